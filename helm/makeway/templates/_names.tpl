{{/* Names, labels and images. Release names may have dots, names of Services may not. */}}

{{- define "makeway.name" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- if contains $name .Release.Name -}}{{ .Release.Name | replace "." "-" | trunc 40 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name $name | replace "." "-" | trunc 40 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{/* The installation: pods of jobs and sessions are labelled with it, and several may share a cluster. */}}
{{- define "makeway.instance" -}}
{{- $instance := printf "%s.%s" .Release.Namespace (include "makeway.name" .) -}}
{{- if gt (len $instance) 63 }}{{ printf "%s-%s" ($instance | trunc 54 | trimAll "-.") ($instance | sha256sum | trunc 8) }}
{{- else }}{{ $instance }}{{ end -}}
{{- end -}}

{{/* A namespace of more than 58 characters leaves no room for -jobs. */}}
{{- define "makeway.jobsNamespace" -}}
{{- $own := .Release.Namespace -}}
{{- if gt (len $own) 58 }}{{ $own = printf "%s-%s" (trunc 49 $own | trimSuffix "-") (sha256sum $own | trunc 8) }}{{ end -}}
{{ .Values.jobs.namespace | default (printf "%s-jobs" $own) }}
{{- end -}}

{{- define "makeway.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "makeway.labels" -}}
{{ include "makeway.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "makeway.image" -}}
{{- $one := index .root.Values.images .which -}}
{{ $one.repository }}{{ if $one.digest }}@{{ $one.digest }}{{ else }}:{{ $one.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end -}}

{{- define "makeway.pullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "makeway.secret" -}}{{ .Values.existingSecret | default (include "makeway.name" .) }}{{- end -}}

{{- define "makeway.postgresql" -}}{{ if .Values.database.existingSecret }}true{{ end }}{{- end -}}

{{/* Whether large files have a volume of their own. With --reuse-values, `storage` of a later chart is missing: they stay. */}}
{{- define "makeway.filesVolume" -}}
{{- if and (not (include "makeway.postgresql" .)) (not .Values.artifacts.s3) (dig "storage" "size" "" .Values.artifacts) }}true{{ end -}}
{{- end -}}

{{- define "makeway.replicas" -}}
{{- if kindIs "invalid" .Values.service.replicas -}}{{ ternary 2 1 (eq (include "makeway.postgresql" .) "true") }}
{{- else -}}{{ .Values.service.replicas }}{{- end -}}
{{- end -}}

{{/* Whether everyone logs in with the same password: not a site with accounts of its own. */}}
{{- define "makeway.firstLook" -}}
{{- if has (dig "JupyterHub" "authenticator_class" "" (.Values.hub.config | default dict) | toString) (list "dummy" "jupyterhub.auth.DummyAuthenticator") }}true{{ end -}}
{{- end -}}

{{/* How the service sees the Hub, and notebooks the service. */}}
{{- define "makeway.baseUrl" -}}
{{- if eq .Values.mode "addOn" }}{{ .Values.zeroToJupyterHub.baseUrl }}
{{- else }}{{ printf "/%s/" (dig "JupyterHub" "base_url" "" (.Values.hub.config | default dict) | trimAll "/") | replace "//" "/" }}{{ end -}}
{{- end -}}

{{/* The Hub's origin for browsers where servers of users have names below it, https://gpus.example.com, and the panel's; else empty. */}}
{{- define "makeway.subdomainHost" -}}
{{- $given := dig "JupyterHub" "subdomain_host" "" (.Values.hub.config | default dict) -}}
{{- if eq .Values.mode "addOn" }}{{ $given = dig "subdomainHost" "" .Values.zeroToJupyterHub }}{{ end -}}
{{- with $given }}{{ contains "://" . | ternary "" "https://" }}{{ . | trimSuffix "/" | lower }}{{ end -}}
{{- end -}}
{{- define "makeway.panelOrigin" -}}{{ include "makeway.subdomainHost" . | replace "://" "://makeway--service." }}{{- end -}}
{{- define "makeway.subdomainName" -}}{{ regexReplaceAll "^https?://([^:/]*).*$" (include "makeway.subdomainHost" .) "${1}" }}{{- end -}}

{{/* What of a host belongs to the portal. With names of users' servers, all of it: their paths begin with other prefixes. */}}
{{- define "makeway.routedPath" -}}
{{- if include "makeway.subdomainHost" . }}/{{ else }}{{ include "makeway.baseUrl" . | trimSuffix "/" | default "/" }}{{ end -}}
{{- end -}}

{{- define "makeway.prefix" -}}{{ include "makeway.baseUrl" . | trimSuffix "/" }}/services/makeway/{{- end -}}
{{- define "makeway.serviceHost" -}}{{ include "makeway.name" . }}-service.{{ .Release.Namespace }}.svc{{- end -}}
{{- define "makeway.hubApi" -}}
{{- if eq .Values.mode "addOn" -}}{{ .Values.zeroToJupyterHub.apiUrl }}
{{- else -}}http://{{ include "makeway.name" . }}-hub:8081{{ include "makeway.baseUrl" . }}hub/api{{- end -}}
{{- end -}}
{{- define "makeway.url" -}}
{{- if eq .Values.mode "addOn" -}}{{ .Values.zeroToJupyterHub.proxyUrl | trimSuffix "/" }}
{{- else -}}http://{{ include "makeway.name" . }}-proxy{{- end -}}
{{- include "makeway.prefix" . | trimSuffix "/" -}}
{{- end -}}

{{- define "makeway.ownPriorityClass" -}}
{{ (index . 0).Release.Namespace }}-{{ include "makeway.name" (index . 0) }}-{{ index . 1 }}
{{- end -}}

{{/* The value of one of the chart's classes: (list $ kind). With --reuse-values, `portal` of a later chart is missing. */}}
{{- define "makeway.priorityValue" -}}
{{ dig (index . 1) 2000 (index . 0).Values.priorityClasses | int64 }}
{{- end -}}

{{/* The class of guaranteed or preemptible work, or of the portal: (list $ kind "the class that the values name"). */}}
{{- define "makeway.priorityClass" -}}
{{- if index . 2 -}}{{ index . 2 }}
{{- else if (index . 0).Values.priorityClasses.create -}}{{ include "makeway.ownPriorityClass" . }}
{{- end -}}
{{- end -}}
