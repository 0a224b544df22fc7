{{/* Names and labels. `.` is always this chart's own scope: a parent passes `index .Subcharts "ratelimit-rls"`. */}}

{{- define "ratelimit-rls.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough for a DNS label with the longest suffix ("-sidecar-example"). */}}
{{- define "ratelimit-rls.fullname" -}}
{{- $name := include "ratelimit-rls.name" . -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $full .Values.fullnameOverride | trunc 47 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels of pods, without a version: a label that changes with every release would restart them needlessly. */}}
{{- define "ratelimit-rls.selectorLabels" -}}
app.kubernetes.io/name: {{ include "ratelimit-rls.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "ratelimit-rls.limiterLabels" -}}
{{ include "ratelimit-rls.selectorLabels" . }}
app.kubernetes.io/component: limiter
{{- end -}}

{{/* Reserved label names: selectors use some of them, and keys must be unique. */}}
{{- define "ratelimit-rls.reservedLabels" -}}
{{- list "helm.sh/chart" "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" | toJson -}}
{{- end -}}

{{- define "ratelimit-rls.labels" -}}
{{ include "ratelimit-rls.labelsAnd" (list . dict) }}
{{- end -}}

{{/* Common labels with those of one object, which take precedence. */}}
{{- define "ratelimit-rls.labelsAnd" -}}
{{- $more := index . 1 -}}
{{- with index . 0 -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "ratelimit-rls.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with merge dict (default dict $more) (default dict .Values.commonLabels) }}
{{ toYaml . }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "ratelimit-rls.serviceAccountName" -}}
{{- $made := .Values.serviceAccount.create | ternary (include "ratelimit-rls.fullname" .) "default" -}}
{{- default $made .Values.serviceAccount.name -}}
{{- end -}}

{{- define "ratelimit-rls.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{/* A setting of `settings` formatted as a variable; empty if not set. */}}
{{- define "ratelimit-rls.setting" -}}
{{- $settings := default dict (index . 0).Values.settings -}}
{{- if hasKey $settings (index . 1) -}}
{{- include "ratelimit-rls.text" (get $settings (index . 1)) -}}
{{- end -}}
{{- end -}}

{{/* Not empty if a setting is true, in any notation of Go's ParseBool. */}}
{{- define "ratelimit-rls.isOn" -}}
{{- if has (include "ratelimit-rls.setting" .) (list "1" "t" "T" "TRUE" "true" "True") -}}true{{- end -}}
{{- end -}}

{{/* Not empty if the rules come from files; with xDS they do not. */}}
{{- define "ratelimit-rls.rulesFromFiles" -}}
{{- if ne (include "ratelimit-rls.setting" (list . "CONFIG_TYPE")) "GRPC_XDS_SOTW" -}}true{{- end -}}
{{- end -}}

{{/* Not empty if no rules are set, so that the example rules are used. */}}
{{- define "ratelimit-rls.exampleRules" -}}
{{- if and (include "ratelimit-rls.rulesFromFiles" .) (not .Values.descriptors.inline) (not .Values.descriptors.existingConfigMap) -}}true{{- end -}}
{{- end -}}

{{- define "ratelimit-rls.rulesConfigMap" -}}
{{- default (printf "%s-descriptors" (include "ratelimit-rls.fullname" .)) .Values.descriptors.existingConfigMap -}}
{{- end -}}

{{- define "ratelimit-rls.redisName" -}}
{{ include "ratelimit-rls.fullname" . }}-redis
{{- end -}}

{{- define "ratelimit-rls.redisUrl" -}}
{{- if .Values.redis.deploy.enabled -}}
{{ include "ratelimit-rls.redisName" . }}:6379
{{- else -}}
{{ .Values.redis.url }}
{{- end -}}
{{- end -}}

{{/* Not empty if counters are in Redis, even if its address is only in a Secret. */}}
{{- define "ratelimit-rls.hasRedis" -}}
{{- if or (include "ratelimit-rls.redisUrl" .) .Values.redis.existingSecret.name -}}true{{- end -}}
{{- end -}}

{{/* Not empty if there is an external Redis. */}}
{{- define "ratelimit-rls.externalRedis" -}}
{{- if or .Values.redis.url .Values.redis.existingSecret.name (include "ratelimit-rls.setting" (list . "REDIS_PERSECOND_URL")) -}}true{{- end -}}
{{- end -}}

{{/*
The ports in an address of Redis, as JSON. Parts without a scheme have a port only as host:port: others are the name of a
master, a socket, or invalid, which the service rejects.
*/}}
{{- define "ratelimit-rls.redisPorts" -}}
{{- $ports := list -}}
{{- range splitList "," . -}}
{{- $address := regexReplaceAll "[/?].*$" (regexReplaceAll "^(rediss?|unix)://" (trim .) "") "" -}}
{{- $port := regexFind ":[0-9]+$" $address | trimPrefix ":" -}}
{{- if $port -}}
{{- $ports = append $ports $port -}}
{{- else if regexMatch "^rediss?://" (trim .) -}}
{{- $ports = append $ports "6379" -}}
{{- end -}}
{{- end -}}
{{- $ports | uniq | toJson -}}
{{- end -}}

{{/* Not empty if there is a database. Its address is only in a Secret. */}}
{{- define "ratelimit-rls.hasDatabase" -}}
{{- if .Values.database.existingSecret.name -}}true{{- end -}}
{{- end -}}

{{/*
The name contains a hash of the content: the service reads issuers only at start, so a change must create another
ConfigMap and replace the pods, also in charts that include the templates.
*/}}
{{- define "ratelimit-rls.issuersConfigMap" -}}
{{ include "ratelimit-rls.fullname" . }}-issuers-{{ .Values.identity.jwtIssuers | toJson | sha256sum | trunc 8 }}
{{- end -}}

{{/* Maximum number of pods, by which `local` divides limits. */}}
{{- define "ratelimit-rls.maxReplicas" -}}
{{- .Values.autoscaling.enabled | ternary .Values.autoscaling.maxReplicas .Values.replicaCount | int -}}
{{- end -}}

{{/* Minimum number of pods, which determines whether a disruption budget makes sense. */}}
{{- define "ratelimit-rls.minReplicas" -}}
{{- .Values.autoscaling.enabled | ternary .Values.autoscaling.minReplicas .Values.replicaCount | int -}}
{{- end -}}

{{/* A file of alerts, with `docsUrl` in its runbook URLs. */}}
{{- define "ratelimit-rls.alertsText" -}}
{{- $place := (index . 0).Values.metrics.alerts.docsUrl -}}
{{- index . 1 | toString | trim | replace "runbook_url: docs/" (printf "runbook_url: %sdocs/" (empty $place | ternary "" (printf "%s/" (trimSuffix "/" $place)))) -}}
{{- end -}}

{{- define "ratelimit-rls.socket" -}}
{{ trimSuffix "/" .Values.sidecar.socketDirectory }}/rls.sock
{{- end -}}

{{/* Common pod specification of all pods of this chart (not of Envoy's). */}}
{{- define "ratelimit-rls.podSpec" -}}
automountServiceAccountToken: false
# Variables that Kubernetes creates for Services, such as GRPC_PORT of a Service called grpc, would be read as settings.
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- end -}}
