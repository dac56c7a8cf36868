"""Archives chains, encrypted, in another place; `import` brings them back."""
