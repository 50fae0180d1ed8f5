"""Make the fields of forms from the tables of a document, and the document from what was typed."""
