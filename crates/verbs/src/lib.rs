//! Owning, safe types over ibverbs.
