"""Define the demo's users and teams, as the sample policy expects them."""

SAMPLE_GROUPS: dict[str, list[str]] = {"rnd": ["ana", "lea"], "devops": ["bo", "lea"]}
SAMPLE_USERS: dict[str, str] = {
    "ana": "team rnd",
    "bo": "team devops",
    "lea": "teams rnd and devops",
    "guest": "no team",
    "admin": "administrator of the Hub and of Makeway",
}
SAMPLE_ADMIN = "admin"
