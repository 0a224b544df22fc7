{{/* Names and labels. `.` is always this chart's own scope: a parent passes `index .Subcharts "ratelimit-rls"`. */}}

{{- define "ratelimit-rls.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough that the longest ending ("-sidecar-example") still makes a DNS label. */}}
{{- define "ratelimit-rls.fullname" -}}
{{- $name := include "ratelimit-rls.name" . -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $full .Values.fullnameOverride | trunc 47 | trimSuffix "-" -}}
{{- end -}}

{{/* Pods have these and no version: a label that changes with every release would restart them for nothing. */}}
{{- define "ratelimit-rls.selectorLabels" -}}
app.kubernetes.io/name: {{ include "ratelimit-rls.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "ratelimit-rls.limiterLabels" -}}
{{ include "ratelimit-rls.selectorLabels" . }}
app.kubernetes.io/component: limiter
{{- end -}}

{{- define "ratelimit-rls.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "ratelimit-rls.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
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

{{/* Not empty if the rules come from files; with xDS they do not. */}}
{{- define "ratelimit-rls.rulesFromFiles" -}}
{{- if ne (get .Values.settings "CONFIG_TYPE" | default "FILE") "GRPC_XDS_SOTW" -}}true{{- end -}}
{{- end -}}

{{/* Not empty if nobody gave rules, so that the example's are served. */}}
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

{{/* How many pods there can be: what `local` divides limits by. */}}
{{- define "ratelimit-rls.mostReplicas" -}}
{{- .Values.autoscaling.enabled | ternary .Values.autoscaling.maxReplicas .Values.replicaCount | int -}}
{{- end -}}

{{/* How many there are at least: whether a disruption budget makes sense. */}}
{{- define "ratelimit-rls.leastReplicas" -}}
{{- .Values.autoscaling.enabled | ternary .Values.autoscaling.minReplicas .Values.replicaCount | int -}}
{{- end -}}

{{- define "ratelimit-rls.socket" -}}
{{ trimSuffix "/" .Values.sidecar.socketDirectory }}/rls.sock
{{- end -}}

{{/* What a pod of our own (not one of Envoy's) is like, whoever runs in it. */}}
{{- define "ratelimit-rls.ownPod" -}}
automountServiceAccountToken: false
# Variables that Kubernetes makes of Services, such as GRPC_PORT of one called grpc, would be taken for settings.
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- end -}}
