//! A crate without code: its manifest turns on features of libraries.
