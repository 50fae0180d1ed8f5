{{/* Values that have no effect as an add-on, because Zero to JupyterHub brings the Hub, the proxy and the notebooks. */}}

{{/* Their defaults: tests/helm compares them with values.yaml. */}}
{{- define "makeway.standaloneValues" -}}
images:
  hub: {repository: makeway.test/hub, tag: "1", digest: ""}
  proxy: {repository: quay.io/jupyterhub/configurable-http-proxy, tag: "5.3.0", digest: ""}
hub:
  config: {JupyterHub: {authenticator_class: dummy}}
  extraConfig: {}
  makewayAdmins: {users: [], groups: []}
  database: {existingSecret: "", key: url, storage: {size: 1Gi, storageClass: null}}
  extraEnv: []
  extraVolumes: []
  extraVolumeMounts: []
  serviceAccountAnnotations: {}
  resources: {requests: {cpu: 200m, memory: 512Mi}, limits: {memory: 2Gi}}
  nodeSelector: {}
  tolerations: []
  affinity: {}
  priorityClassName: ""
  podLabels: {}
  podAnnotations: {}
proxy:
  service: {type: ClusterIP, annotations: {}}
  publicUrl: ""
  ingress: {enabled: false, className: "", host: "", tlsSecret: "", annotations: {}}
  httpRoute: {enabled: false, parentRefs: [], hostnames: [], annotations: {}, timeouts: {request: 0s}}
  resources: {requests: {cpu: 100m, memory: 128Mi}, limits: {memory: 512Mi}}
  nodeSelector: {}
  tolerations: []
  affinity: {}
  priorityClassName: ""
  podLabels: {}
  podAnnotations: {}
notebooks:
  home: {size: 10Gi, storageClass: null}
  priorityClasses: {guaranteed: "", preemptible: ""}
networkPolicy:
  extraEgress: {hub: [], proxy: [], notebooks: []}
{{- end -}}

{{/* Where each belongs instead: the longest beginning of its name counts; PATH is that name. Empty: nowhere, as it is only of this chart. */}}
{{- define "makeway.addOnInstead" -}}
images.hub: hub.image in the values of Zero to JupyterHub (as z2jh-values.yaml has it)
images.proxy: proxy.chp.image in the values of Zero to JupyterHub
hub: PATH in the values of Zero to JupyterHub
hub.makewayAdmins: admin_users and admin_groups in z2jh-values.yaml
hub.database: hub.db in the values of Zero to JupyterHub
hub.serviceAccountAnnotations: hub.serviceAccount.annotations in the values of Zero to JupyterHub
hub.affinity: hub.extraPodSpec in the values of Zero to JupyterHub
hub.priorityClassName: scheduling.podPriority in the values of Zero to JupyterHub
hub.podLabels: hub.labels in the values of Zero to JupyterHub
hub.podAnnotations: hub.annotations in the values of Zero to JupyterHub
proxy.service: PATH in the values of Zero to JupyterHub
proxy.publicUrl: ""
proxy.httpRoute: an HTTPRoute of yours to the Service proxy-public
proxy.ingress: ingress in the values of Zero to JupyterHub
proxy.resources: proxy.chp.resources in the values of Zero to JupyterHub
proxy.nodeSelector: proxy.chp.nodeSelector in the values of Zero to JupyterHub
proxy.tolerations: proxy.chp.tolerations in the values of Zero to JupyterHub
proxy.affinity: scheduling.corePods in the values of Zero to JupyterHub
proxy.priorityClassName: scheduling.podPriority in the values of Zero to JupyterHub
proxy.podLabels: proxy.labels in the values of Zero to JupyterHub
proxy.podAnnotations: proxy.annotations in the values of Zero to JupyterHub
notebooks.home: singleuser.storage in the values of Zero to JupyterHub
notebooks.priorityClasses: guaranteed_priority_class and preemptible_priority_class in z2jh-values.yaml
networkPolicy.extraEgress.hub: hub.networkPolicy.egress in the values of Zero to JupyterHub
networkPolicy.extraEgress.proxy: proxy.chp.networkPolicy.egress in the values of Zero to JupyterHub
networkPolicy.extraEgress.notebooks: singleuser.networkPolicy.egress in the values of Zero to JupyterHub
{{- end -}}

{{/* A value as text. Some releases of Helm leave defaults out that are null. */}}
{{- define "makeway.comparable" -}}{{ toJson . | replace ",\"storageClass\":null" "" }}{{- end -}}

{{- define "makeway.addOnChecks" -}}
{{- $instead := include "makeway.addOnInstead" . | fromYaml -}}
{{- range $part, $usual := include "makeway.standaloneValues" . | fromYaml -}}
{{- $given := index $.Values $part | default dict -}}
{{- if eq $part "networkPolicy" }}{{ $usual = $usual.extraEgress }}{{ $given = $given.extraEgress | default dict }}{{ $part = "networkPolicy.extraEgress" }}{{ end -}}
{{- range $name, $default := $usual -}}
{{- /* With --reuse-values, values of later charts are missing. */ -}}
{{- $older := and $.Release.IsUpgrade (not (hasKey $given $name)) -}}
{{- if and (not $older) (ne (include "makeway.comparable" $default) (include "makeway.comparable" (index $given $name))) -}}
{{- $path := printf "%s.%s" $part $name -}}
{{- $place := hasKey $instead $path | ternary (get $instead $path) (get $instead $part) | replace "PATH" $path -}}
{{- $instead := $place | empty | ternary "" (printf ", and set %s" $place) -}}
{{- $unset := $.Release.IsUpgrade | ternary " If you have not set it, it is the default of an earlier chart: upgrade with --reset-then-reuse-values instead of --reuse-values." "" -}}
{{- fail (printf "%s has no effect in mode addOn. Remove it here%s.%s" $path $instead $unset) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
