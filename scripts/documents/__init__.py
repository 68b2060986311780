"""The tables and numbers of README.md and docs/*.md, by the file that they are made from; see ../update_docs.py."""
