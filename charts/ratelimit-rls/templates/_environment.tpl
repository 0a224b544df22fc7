{{/* Environment variables of the service: those derived from other values override `settings`. */}}

{{/* A value formatted as a variable. Helm parses numbers as floats and would write 167772160 as 1.6777216e+08. */}}
{{- define "ratelimit-rls.text" -}}
{{- if kindIs "slice" . -}}
{{ join "," . }}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}
{{ int64 . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}

{{/* Variables derived from other values, as a mapping. _validate.tpl rejects the same names in `settings`. */}}
{{- define "ratelimit-rls.derived" -}}
PORT: {{ .Values.ports.http | quote }}
GRPC_PORT: {{ .Values.ports.grpc | quote }}
DEBUG_PORT: {{ .Values.ports.debug | quote }}
RLS_RUNTIME_DIR: /run/rls
RLS_REPLICAS: {{ include "ratelimit-rls.maxReplicas" . | quote }}
RLS_DRAIN_TIMEOUT: {{ .Values.drain.timeoutSeconds | int64 }}s
{{- if ne .Values.mode "sidecar" }}
RLS_DRAIN_DELAY: {{ .Values.drain.delaySeconds | int64 }}s
{{- else }}
GRPC_UDS: {{ include "ratelimit-rls.socket" . | quote }}
{{- /* A native sidecar is stopped after Envoy has exited, so no drain delay is needed. */}}
RLS_DRAIN_DELAY: {{ .Values.sidecar.native | ternary 0 .Values.sidecar.drainDelaySeconds | int64 }}s
{{- end }}
{{- if include "ratelimit-rls.rulesFromFiles" . }}
RLS_RULES: /etc/ratelimit-rls/rules
{{- end }}
{{- if .Values.metrics.enabled }}
USE_STATSD: "false"
USE_PROMETHEUS: "true"
PROMETHEUS_ADDR: ":{{ .Values.ports.metrics }}"
PROMETHEUS_PATH: {{ .Values.metrics.path | quote }}
{{- end }}
{{- with include "ratelimit-rls.redisUrl" . }}
REDIS_URL: {{ . | quote }}
{{- end }}
{{- if .Values.redis.auth.existingSecret }}
REDIS_AUTH_FILE: /etc/ratelimit-rls/redis-auth/auth
{{- end }}
{{- if .Values.redis.tls.enabled }}
REDIS_TLS: "true"
{{- if and .Values.redis.tls.existingSecret .Values.redis.tls.caKey }}
REDIS_TLS_CACERT: /etc/ratelimit-rls/redis-tls/ca.crt
{{- end }}
{{- if and .Values.redis.tls.existingSecret .Values.redis.tls.certKey }}
REDIS_TLS_CLIENT_CERT: /etc/ratelimit-rls/redis-tls/tls.crt
REDIS_TLS_CLIENT_KEY: /etc/ratelimit-rls/redis-tls/tls.key
{{- end }}
{{- end }}
{{- if include "ratelimit-rls.hasDatabase" . }}
RLS_SNAPSHOT_FILE: /var/lib/ratelimit-rls/snapshot
RLS_ADMIN_PORT: {{ .Values.ports.admin | quote }}
RLS_ADMIN_HOST: {{ .Values.admin.enabled | ternary "0.0.0.0" "127.0.0.1" }}
{{- end }}
{{- if .Values.identity.jwtIssuers }}
RLS_JWT_ISSUERS: /etc/ratelimit-rls/issuers/issuers.yaml
{{- end }}
{{- if ne .Values.mode "sidecar" }}
{{- /* The service treats names that end in .svc as internal, but name.namespace could be a public name. */}}
{{- $name := include "ratelimit-rls.fullname" . }}
{{- $hosts := list (printf "%s.%s" $name .Release.Namespace) (printf "%s-headless.%s" $name .Release.Namespace) (printf "%s-metrics.%s" $name .Release.Namespace) }}
RLS_HTTP_ALLOWED_HOSTS: {{ append $hosts (include "ratelimit-rls.setting" (list . "RLS_HTTP_ALLOWED_HOSTS")) | compact | join "," | quote }}
{{- end }}
{{- if .Values.tls.enabled }}
GRPC_SERVER_USE_TLS: "true"
{{- if .Values.tls.http }}
RLS_HTTP_TLS: "true"
{{- end }}
GRPC_SERVER_TLS_CERT: /etc/ratelimit-rls/tls/tls.crt
GRPC_SERVER_TLS_KEY: /etc/ratelimit-rls/tls/tls.key
{{- if .Values.tls.clientCa.key }}
GRPC_CLIENT_TLS_CACERT: /etc/ratelimit-rls/tls/client-ca.crt
{{- end }}
{{- if .Values.tls.crl.key }}
GRPC_SERVER_TLS_CRL: /etc/ratelimit-rls/tls/crl.pem
{{- end }}
{{- end }}
{{- end -}}

{{/* The `env` list of a container, sorted by name, so that rendering is deterministic. */}}
{{- define "ratelimit-rls.environment" -}}
{{- $variables := dict -}}
{{- range $name, $value := default dict .Values.settings -}}
{{- $_ := set $variables $name (include "ratelimit-rls.text" $value) -}}
{{- end -}}
{{- $variables = mergeOverwrite $variables (include "ratelimit-rls.derived" . | fromYaml) -}}
{{- range $name := keys $variables | sortAlpha }}
- name: {{ $name }}
  value: {{ get $variables $name | quote }}
{{- end }}
{{- with .Values.redis.existingSecret.name }}
- name: REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $.Values.redis.existingSecret.key | quote }}}}
{{- end }}
{{- include "ratelimit-rls.databaseEnvironment" . }}
{{- with .Values.database.existingSecret.name }}
- name: RLS_KEY_SECRET
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $.Values.database.existingSecret.keySecretKey | quote }}}}
{{- if $.Values.database.existingSecret.adminTokenKey }}
- name: RLS_ADMIN_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $.Values.database.existingSecret.adminTokenKey | quote }}}}
{{- end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Variables for connecting to the database; the last two are read by the driver, and the address overrides them. */}}
{{- define "ratelimit-rls.databaseEnvironment" -}}
{{- with .Values.database.existingSecret.name }}
- name: RLS_DATABASE_URL
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $.Values.database.existingSecret.urlKey | quote }}}}
{{- if $.Values.database.tls.existingSecret }}
- name: PGSSLMODE
  value: verify-full
- name: PGSSLROOTCERT
  value: /etc/ratelimit-rls/database-tls/ca.crt
{{- end }}
{{- end }}
{{- end -}}
