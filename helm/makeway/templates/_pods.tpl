{{/* What all pods of the chart have in common: the restricted pod security standard and more. */}}

{{- define "makeway.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "makeway.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "makeway.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The toleration of a taint that is written as key, key=value, key:effect or key=value:effect. */}}
{{- define "makeway.toleration" -}}
{{- $parts := splitn ":" 2 . -}}
{{- $taint := splitn "=" 2 $parts._0 -}}
key: {{ $taint._0 | quote }}
operator: {{ ternary "Equal" "Exists" (contains "=" $parts._0) }}
{{- with $taint._1 }}
value: {{ . | quote }}
{{- end }}
{{- with $parts._1 }}
effect: {{ . }}
{{- end }}
{{- end -}}

{{/* The priority class of a part of the portal: (list $ "the class that the values name"). */}}
{{- define "makeway.portalPriority" -}}
{{- with include "makeway.priorityClass" (list (index . 0) "portal" (index . 1)) }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* The service account of a component: (list $ component annotations). Only pods that say so get its token. */}}
{{- define "makeway.account" -}}
{{- $root := index . 0 -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "makeway.name" $root }}-{{ index . 1 }}
  labels:
    {{- include "makeway.labels" $root | nindent 4 }}
  {{- with index . 2 }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end -}}

{{/* The storage class of a claim: null is the cluster's default, "" is none, for volumes that exist already. */}}
{{- define "makeway.storageClass" -}}
{{- if not (kindIs "invalid" .storageClass) }}storageClassName: {{ .storageClass | quote }}{{ end -}}
{{- end -}}

{{/* A variable from the chart's Secret: (list $ NAME key). */}}
{{- define "makeway.fromSecret" -}}
- name: {{ index . 1 }}
  valueFrom: {secretKeyRef: {name: {{ include "makeway.secret" (index . 0) | quote }}, key: {{ index . 2 }}}}
{{- end -}}
