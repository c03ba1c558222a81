"""What a reply must look like: schemas, grammars and calls as token masks."""
