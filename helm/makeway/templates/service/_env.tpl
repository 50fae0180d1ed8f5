{{/* The service's environment. tests/helm compares every variable with the settings that the service has. */}}
{{- define "makeway.serviceEnv" -}}
- {name: JUPYTERHUB_SERVICE_URL, value: "http://[::]:8765"} # of IPv4, too
- {name: JUPYTERHUB_SERVICE_PREFIX, value: {{ include "makeway.prefix" . | quote }}}
- {name: JUPYTERHUB_BASE_URL, value: {{ include "makeway.baseUrl" . | quote }}}
- {name: JUPYTERHUB_API_URL, value: {{ include "makeway.hubApi" . | quote }}}
- {name: JUPYTERHUB_CLIENT_ID, value: service-makeway}
- {name: JUPYTERHUB_OAUTH_ACCESS_SCOPES, value: '["access:services!service=makeway"]'}
{{- with include "makeway.subdomainHost" . }}
- {name: JUPYTERHUB_HOST, value: {{ . | quote }}}
- {name: JUPYTERHUB_OAUTH_CALLBACK_URL, value: "{{ include "makeway.panelOrigin" $ }}{{ include "makeway.prefix" $ }}oauth_callback"}
{{- end }}
{{- if eq .Values.mode "addOn" }}
- name: JUPYTERHUB_API_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.zeroToJupyterHub.secret | quote }}, key: hub.services.makeway.apiToken}}
{{- else }}
{{ include "makeway.fromSecret" (list . "JUPYTERHUB_API_TOKEN" "service-token") }}
{{- end }}
{{ include "makeway.fromSecret" (list . "MAKEWAY_TICKET_SECRET" "ticket-secret") }}
{{ include "makeway.fromSecret" (list . "MAKEWAY_METRICS_TOKEN" "metrics-token") }}
- {name: MAKEWAY_URL, value: {{ include "makeway.url" . | quote }}}
- {name: MAKEWAY_STATE_DIR, value: /data}
- {name: MAKEWAY_POLICY_FILE, value: /etc/makeway/policy.yaml}
{{- if include "makeway.deployment" . }}
- {name: MAKEWAY_DEPLOYMENT_FILE, value: /etc/makeway/deployment.yaml}
{{- end }}
- {name: MAKEWAY_KEEP, value: "1"} # an upgrade of the chart leaves jobs running
{{- if .Values.database.existingSecret }}
- name: MAKEWAY_DB_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.database.existingSecret | quote }}, key: {{ .Values.database.key | quote }}}}
{{- end }}
{{- if include "makeway.filesVolume" . }}
- {name: MAKEWAY_ARTIFACTS_DIR, value: /files/artifacts}
{{- end }}
{{- with .Values.artifacts.s3 }}
- {name: MAKEWAY_ARTIFACTS_S3, value: {{ . | quote }}}
{{- end }}
{{- with .Values.artifacts.existingSecret }}
{{- range list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" }}
- name: {{ . }}
  valueFrom: {secretKeyRef: {name: {{ $.Values.artifacts.existingSecret | quote }}, key: {{ . }}}}
{{- end }}
{{- end }}
{{- range $name, $value := .Values.service.settings }}
- {name: MAKEWAY_{{ regexReplaceAll "([A-Z])" $name "_${1}" | upper }}, value: {{ include "makeway.text" $value | quote }}}
{{- end }}
{{ include "makeway.kubernetesEnv" . }}
{{- include "makeway.sharedEnv" (list . .Values.service.extraEnv) }}
{{- with .Values.service.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A value as text. Helm reads numbers as floating-point ones, and would write a million as 1e+06. */}}
{{- define "makeway.text" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{/* The deployment document that an empty database starts with, where the cluster's autoscaler adds nodes. */}}
{{- define "makeway.deployment" -}}
{{- if dig "enabled" false (.Values.clusterAutoscaler | default dict) }}{{ dig "deployment" "" .Values.clusterAutoscaler }}{{ end -}}
{{- end -}}

{{/* The settings of the backend for pods. */}}
{{- define "makeway.kubernetesEnv" -}}
{{- $grows := dig "enabled" false (.Values.clusterAutoscaler | default dict) }}
- {name: MAKEWAY_BACKEND, value: {{ ternary "kubernetes,machines" "kubernetes" $grows | quote }}}
{{- if and $grows .Values.priorityClasses.create }}
- {name: MAKEWAY_KUBE_PLACEHOLDER_CLASS, value: {{ include "makeway.ownPriorityClass" (list . "placeholder") | quote }}}
{{- end }}
- {name: MAKEWAY_KUBE_NAMESPACE, value: {{ include "makeway.jobsNamespace" . | quote }}}
- {name: MAKEWAY_KUBE_INSTANCE, value: {{ include "makeway.instance" . | quote }}}
- {name: MAKEWAY_WORKER_URL, value: "http://{{ include "makeway.serviceHost" . }}:8765{{ include "makeway.prefix" . | trimSuffix "/" }}"}
- {name: MAKEWAY_KUBE_LAUNCHER_IMAGE, value: {{ include "makeway.image" (dict "root" . "which" "service") | quote }}}
- {name: MAKEWAY_KUBE_IMAGE, value: {{ include "makeway.image" (dict "root" . "which" "notebook") | quote }}}
- {name: MAKEWAY_KUBE_SERVICE_ACCOUNT, value: makeway-job}
- {name: MAKEWAY_KUBE_RUN_AS, value: {{ include "makeway.platformUsers" . | empty | ternary .Values.jobs.runAs "platform" | quote }}}
{{- if dig "cpuLimits" false .Values.jobs }}
- {name: MAKEWAY_KUBE_CPU_LIMITS, value: "1"}
{{- end }}
{{- with dig "launcherResources" dict .Values.jobs }}
- {name: MAKEWAY_KUBE_LAUNCHER_RESOURCES, value: {{ toJson . | quote }}}
{{- end }}
{{- with include "makeway.jobsPod" . }}
- {name: MAKEWAY_KUBE_POD, value: {{ . | quote }}}
{{- end }}
- {name: MAKEWAY_KUBE_CHECKPOINT_CLAIM, value: {{ .Values.jobs.checkpoints.existingClaim | default "makeway-checkpoints" | quote }}}
- {name: MAKEWAY_KUBE_DISK_REQUEST, value: {{ dig "disk" "request" "1Gi" .Values.jobs | quote }}}
- {name: MAKEWAY_KUBE_DISK_LIMIT, value: {{ dig "disk" "limit" "50Gi" .Values.jobs | quote }}}
{{- with dig "home" "claim" "" .Values.jobs }}
- {name: MAKEWAY_KUBE_HOME_CLAIM, value: {{ . | quote }}}
- {name: MAKEWAY_KUBE_HOME_PATH, value: {{ dig "home" "path" "/home/jovyan" $.Values.jobs | quote }}}
{{- end }}
{{- with include "makeway.priorityClass" (list . "preemptible" .Values.jobs.priorityClass) }}
- {name: MAKEWAY_KUBE_PRIORITY_CLASS, value: {{ . | quote }}}
{{- end }}
{{- with .Values.jobs.tolerations }}
- {name: MAKEWAY_KUBE_TOLERATIONS, value: {{ join "," . | quote }}}
{{- end }}
{{- end -}}
