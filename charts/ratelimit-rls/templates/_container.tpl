{{/*
The container of the service and its volumes, the same in both modes.

For charts of pods that run Envoy, with this chart as a dependency in sidecar mode (complete example in docs/kubernetes.md):

  {{- $limiter := index .Subcharts "ratelimit-rls" }}
  ratelimit-rls.container     one element of `initContainers` (sidecar.native) or of `containers`
  ratelimit-rls.volumes       elements of `volumes`
  ratelimit-rls.socketMount   one element of the `volumeMounts` of Envoy's container
  ratelimit-rls.socket        the socket's path, for Envoy's cluster
*/}}

{{- define "ratelimit-rls.container" -}}
{{- $sidecar := eq .Values.mode "sidecar" -}}
name: ratelimit-rls
image: {{ include "ratelimit-rls.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- if and $sidecar .Values.sidecar.native }}
restartPolicy: Always
{{- end }}
env: {{- include "ratelimit-rls.environment" . | nindent 2 }}
ports:
  {{- if not $sidecar }}
  - {name: grpc, containerPort: {{ .Values.ports.grpc }}}
  {{- end }}
  - {name: {{ $sidecar | ternary "rls-http" "http" }}, containerPort: {{ .Values.ports.http }}}
  {{- if .Values.admin.enabled }}
  - {name: admin, containerPort: {{ .Values.ports.admin }}}
  {{- end }}
  {{- if .Values.metrics.enabled }}
  - {name: {{ $sidecar | ternary "rls-metrics" "metrics" }}, containerPort: {{ .Values.ports.metrics }}}
  {{- end }}
{{- with .Values.probes.startup }}
startupProbe: {{- include "ratelimit-rls.probe" (list $ . "" "/livez") | nindent 2 }}
{{- end }}
{{- with .Values.probes.readiness }}
readinessProbe: {{- include "ratelimit-rls.probe" (list $ . "ratelimit" "/healthcheck") | nindent 2 }}
{{- end }}
{{- with .Values.probes.liveness }}
livenessProbe: {{- include "ratelimit-rls.probe" (list $ . "" "/livez") | nindent 2 }}
{{- end }}
resources: {{- toYaml .Values.resources | nindent 2 }}
securityContext: {{- toYaml .Values.securityContext | nindent 2 }}
volumeMounts: {{- include "ratelimit-rls.volumeMounts" . | nindent 2 }}
{{- end -}}

{{/* gRPC probe if kubelet supports it (neither TLS nor Unix sockets), else the equivalent HTTP probe. */}}
{{- define "ratelimit-rls.probe" -}}
{{- $root := index . 0 -}}
{{- if or $root.Values.tls.enabled (eq $root.Values.mode "sidecar") -}}
httpGet: {path: {{ index . 3 }}, port: {{ $root.Values.ports.http }}{{ if $root.Values.tls.http }}, scheme: HTTPS{{ end }}}
{{- else -}}
grpc: {port: {{ $root.Values.ports.grpc }}, service: {{ index . 2 | quote }}}
{{- end }}
{{ toYaml (index . 1) }}
{{- end -}}

{{- define "ratelimit-rls.volumeMounts" -}}
- {name: ratelimit-rls-run, mountPath: /run/rls}
{{- if eq .Values.mode "sidecar" }}
{{ include "ratelimit-rls.socketMount" . }}
{{- end }}
{{- if include "ratelimit-rls.rulesFromFiles" . }}
- {name: ratelimit-rls-rules, mountPath: /etc/ratelimit-rls/rules, readOnly: true}
{{- end }}
{{- if .Values.redis.auth.existingSecret }}
- {name: ratelimit-rls-redis-auth, mountPath: /etc/ratelimit-rls/redis-auth, readOnly: true}
{{- end }}
{{- if and .Values.redis.tls.enabled .Values.redis.tls.existingSecret }}
- {name: ratelimit-rls-redis-tls, mountPath: /etc/ratelimit-rls/redis-tls, readOnly: true}
{{- end }}
{{- if .Values.tls.enabled }}
- {name: ratelimit-rls-tls, mountPath: /etc/ratelimit-rls/tls, readOnly: true}
{{- end }}
{{- if include "ratelimit-rls.hasDatabase" . }}
- {name: ratelimit-rls-snapshot, mountPath: /var/lib/ratelimit-rls}
{{- end }}
{{- include "ratelimit-rls.databaseMounts" . }}
{{- if .Values.identity.jwtIssuers }}
- {name: ratelimit-rls-issuers, mountPath: /etc/ratelimit-rls/issuers, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "ratelimit-rls.databaseMounts" -}}
{{- if .Values.database.tls.existingSecret }}
- {name: ratelimit-rls-database-tls, mountPath: /etc/ratelimit-rls/database-tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "ratelimit-rls.socketMount" -}}
- {name: ratelimit-rls-socket, mountPath: {{ .Values.sidecar.socketDirectory | quote }}}
{{- end -}}

{{/* Whole directories, never subPath: kubelet does not update subPath mounts. */}}
{{- define "ratelimit-rls.volumes" -}}
- name: ratelimit-rls-run
  emptyDir: {medium: Memory, sizeLimit: 16Mi}
{{- if eq .Values.mode "sidecar" }}
- name: ratelimit-rls-socket
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end }}
{{- if include "ratelimit-rls.rulesFromFiles" . }}
- name: ratelimit-rls-rules
  configMap: {name: {{ include "ratelimit-rls.rulesConfigMap" . | quote }}}
{{- end }}
{{- if .Values.redis.auth.existingSecret }}
- name: ratelimit-rls-redis-auth
  secret:
    secretName: {{ .Values.redis.auth.existingSecret | quote }}
    items: [{key: {{ .Values.redis.auth.key | quote }}, path: auth}]
{{- end }}
{{- if and .Values.redis.tls.enabled .Values.redis.tls.existingSecret }}
- name: ratelimit-rls-redis-tls
  secret:
    secretName: {{ .Values.redis.tls.existingSecret | quote }}
    items:
      {{- if .Values.redis.tls.caKey }}
      - {key: {{ .Values.redis.tls.caKey | quote }}, path: ca.crt}
      {{- end }}
      {{- if .Values.redis.tls.certKey }}
      - {key: {{ .Values.redis.tls.certKey | quote }}, path: tls.crt}
      - {key: {{ .Values.redis.tls.keyKey | quote }}, path: tls.key}
      {{- end }}
{{- end }}
{{- if .Values.tls.enabled }}
- name: ratelimit-rls-tls
  projected:
    sources:
      - secret:
          name: {{ .Values.tls.existingSecret | quote }}
          items:
            - {key: {{ .Values.tls.certKey | quote }}, path: tls.crt}
            - {key: {{ .Values.tls.keyKey | quote }}, path: tls.key}
      {{- if .Values.tls.clientCa.key }}
      - secret:
          name: {{ default .Values.tls.existingSecret .Values.tls.clientCa.existingSecret | quote }}
          items: [{key: {{ .Values.tls.clientCa.key | quote }}, path: client-ca.crt}]
      {{- end }}
      {{- if .Values.tls.crl.key }}
      - secret:
          name: {{ coalesce .Values.tls.crl.existingSecret .Values.tls.clientCa.existingSecret .Values.tls.existingSecret | quote }}
          items: [{key: {{ .Values.tls.crl.key | quote }}, path: crl.pem}]
      {{- end }}
{{- end }}
{{- if include "ratelimit-rls.hasDatabase" . }}
- name: ratelimit-rls-snapshot
  emptyDir: {sizeLimit: {{ .Values.database.snapshotSizeLimit | quote }}}
{{- end }}
{{- include "ratelimit-rls.databaseVolumes" . }}
{{- if .Values.identity.jwtIssuers }}
- name: ratelimit-rls-issuers
  configMap: {name: {{ include "ratelimit-rls.issuersConfigMap" . | quote }}}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "ratelimit-rls.databaseVolumes" -}}
{{- if .Values.database.tls.existingSecret }}
- name: ratelimit-rls-database-tls
  secret:
    secretName: {{ .Values.database.tls.existingSecret | quote }}
    items: [{key: {{ .Values.database.tls.caKey | quote }}, path: ca.crt}]
{{- end }}
{{- end -}}
