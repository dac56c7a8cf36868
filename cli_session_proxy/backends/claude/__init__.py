"""The Claude CLI as a backend: its processes, its sessions, and its transcripts."""
