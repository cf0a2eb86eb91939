"""`speccompile port`: what a team runs today, as the commands that do the same here."""
