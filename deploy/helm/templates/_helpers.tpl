{{- define "csp.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}
{{- define "csp.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "csp.labels" -}}
{{ include "csp.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{- define "csp.check" -}}
{{- if not .Values.postgresql.url }}{{ fail "postgresql.url is needed: proxies of several pods share one store" }}{{ end }}
{{- if regexMatch "//[^/@]*:[^/@]*@" .Values.postgresql.url }}{{ fail "postgresql.url holds a password: put it into postgresql.passwordSecret" }}{{ end }}
{{- if not .Values.clusterKeySecret.name }}{{ fail "clusterKeySecret.name is needed: by it the proxies know each other" }}{{ end }}
{{- if and .Values.keysSecret.name .Values.gateway.header }}{{ fail "keysSecret and gateway are two ways to name an owner: leave one of them out" }}{{ end }}
{{- if not (or .Values.keysSecret.name .Values.gateway.header) }}{{ fail "name keysSecret, or gateway.header with gateway.from: nobody is let in without" }}{{ end }}
{{- if and .Values.gateway.header (not .Values.gateway.from) }}{{ fail "gateway.header needs gateway.from: the addresses of the gateway" }}{{ end }}
{{- if and .Values.archive.to (not .Values.archive.keySecret.name) }}{{ fail "archive.to needs archive.keySecret: chains are encrypted" }}{{ end }}
{{- end }}
