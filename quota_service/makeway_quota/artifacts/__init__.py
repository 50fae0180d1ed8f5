"""Keep large contents by digest, in a folder or in object storage, behind the protocol of `base`; used by the store."""
