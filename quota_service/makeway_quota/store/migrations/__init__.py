"""How the tables came to be, step by step; `makeway-quota upgrade-db` and every start run what is missing."""
