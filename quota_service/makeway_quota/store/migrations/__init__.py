"""Migrations of the tables, step by step; `makeway-quota upgrade-db` and every start run the missing ones."""
