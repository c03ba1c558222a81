"""The required form of a reply: schemas, grammars and calls as token masks."""
