"""Configure JupyterHub: the settings that Makeway needs, then those of this site.

jupyterhub --config hub_config/jupyterhub_config.py        (`make run` does this and prints where to log in)
"""

from makeway_hub.configure import configure

c = get_config()  # noqa: F821 (JupyterHub provides it)
configure(c)
# Everything of JupyterHub may be set as usual, above the call or below it, e.g. c.Authenticator.admin_users = {"ana"}
