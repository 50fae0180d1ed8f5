{{/* What all pods of the chart have in common: the restricted pod security standard and more. */}}

{{- define "makeway.podSecurity" -}}
runAsNonRoot: true
{{- if not (include "makeway.platformUsers" .) }}
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "makeway.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Whether the platform assigns users and groups. With --reuse-values, values of later charts are missing, here and below. */}}
{{- define "makeway.platformUsers" -}}
{{- if eq (dig "users" "fixed" (.Values.podSecurity | default dict)) "platform" }}true{{ end -}}
{{- end -}}

{{/* Labels or annotations of a pod, with those of all: (list $ "podLabels" more). Labels of the chart stay its own. */}}
{{- define "makeway.podMetadata" -}}
{{- $own := merge (dict "app.kubernetes.io/component" "") (include "makeway.labels" (index . 0) | fromYaml) -}}
{{- $given := merge (dict) (index . 2 | default dict) (get (index . 0).Values (index . 1) | default dict) -}}
{{- range $name := keys $own }}{{ $_ := unset $given $name }}{{ end -}}
{{- with $given }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* Annotations of a pod of the portal: (list $ CONTAINER more own). `kubectl logs` and `exec` mean its container, as sidecars may
come first, unless the site names another one; its `own` ones stay as they are. */}}
{{- define "makeway.podAnnotations" -}}
{{- $default := dict "kubectl.kubernetes.io/default-container" (index . 1) -}}
{{- $all := get (index . 0).Values "podAnnotations" | default dict -}}
{{- toYaml (merge (dict) (index . 3) (index . 2 | default dict) $all $default) -}}
{{- end -}}

{{/* The certificate authorities: the ConfigMap's name, empty for none: (list $ namespace). */}}
{{- define "makeway.certificates" -}}
{{- $root := index . 0 }}{{ $given := $root.Values.certificateAuthorities | default dict -}}
{{- if $given.configMap }}{{ $given.configMap }}
{{- else if $given.pem }}{{ ternary (printf "%s-certificates" (include "makeway.name" $root)) "makeway-certificates" (eq (index . 1) $root.Release.Namespace) }}{{ end -}}
{{- end -}}

{{/* Variables of all pods, as a mapping: certificate authorities and the HTTP proxy. */}}
{{- define "makeway.sharedVariables" -}}
{{- if include "makeway.certificates" (list . .Release.Namespace) }}
{{- range list "SSL_CERT_FILE" "REQUESTS_CA_BUNDLE" "CURL_CA_BUNDLE" "NODE_EXTRA_CA_CERTS" "GIT_SSL_CAINFO" "PIP_CERT" "AWS_CA_BUNDLE" }}
{{ . }}: /etc/makeway-certificates/ca.crt
{{- end }}
{{- end }}
{{- $proxy := .Values.httpProxy | default dict }}
{{- with $proxy.url }}
{{- $name := include "makeway.name" $ }}
{{- $domain := $.Values.clusterDomain | default "cluster.local" }}
{{- $direct := list "localhost" "127.0.0.1" "::1" ".svc" (printf ".%s" $domain) "kubernetes.default.svc" (printf "%s-hub" $name) (printf "%s-proxy" $name) (printf "%s-proxy-api" $name) (printf "%s-service" $name) }}
{{- with $proxy.noProxy }}{{ $direct = append $direct . }}{{ end }}
{{- range $names := list (list "HTTP_PROXY" "HTTPS_PROXY" "NO_PROXY") (list "http_proxy" "https_proxy" "no_proxy") }}
{{ index $names 0 }}: {{ $proxy.url | quote }}
{{ index $names 1 }}: {{ $proxy.url | quote }}
{{ index $names 2 }}: {{ join "," $direct | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The same as variables of a container, but for those that it has itself: (list $ itsOwn). */}}
{{- define "makeway.sharedEnv" -}}
{{- $own := list }}{{ range index . 1 }}{{ $own = append $own .name }}{{ end -}}
{{- range $name, $value := include "makeway.sharedVariables" (index . 0) | fromYaml }}
{{- if not (has $name $own) }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* The volume of the certificate authorities, and its mount: (list $ namespace). */}}
{{- define "makeway.sharedVolumes" -}}
{{- with include "makeway.certificates" . }}
- name: certificates
  configMap: {name: {{ . | quote }}, items: [{key: {{ dig "key" "ca.crt" (index $ 0).Values.certificateAuthorities | quote }}, path: ca.crt}]}
{{- end }}
{{- end -}}
{{- define "makeway.sharedMounts" -}}
{{- if include "makeway.certificates" . }}
- {name: certificates, mountPath: /etc/makeway-certificates, readOnly: true}
{{- end }}
{{- end -}}

{{/* The pod template of all jobs, in JSON; empty for none. */}}
{{- define "makeway.jobsPod" -}}
{{- $metadata := dict }}{{ $spec := dict }}{{ $worker := dict -}}
{{- with .Values.podLabels }}{{ $_ := set $metadata "labels" . }}{{ end -}}
{{- with .Values.podAnnotations }}{{ $_ := set $metadata "annotations" . }}{{ end -}}
{{- with include "makeway.sharedEnv" (list . list) | fromYamlArray }}{{ $_ := set $worker "env" . }}{{ end -}}
{{- $certificates := list . (include "makeway.jobsNamespace" .) -}}
{{- with include "makeway.sharedMounts" $certificates | fromYamlArray }}{{ $_ := set $worker "volumeMounts" . }}{{ end -}}
{{- with include "makeway.sharedVolumes" $certificates | fromYamlArray }}{{ $_ := set $spec "volumes" . }}{{ end -}}
{{- with $worker }}{{ $_ := set $spec "containers" (list (merge (dict "name" "worker") .)) }}{{ end -}}
{{- $pod := dict -}}
{{- with $metadata }}{{ $_ := set $pod "metadata" . }}{{ end -}}
{{- with $spec }}{{ $_ := set $pod "spec" . }}{{ end -}}
{{- with $pod }}{{ toJson . }}{{ end -}}
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
