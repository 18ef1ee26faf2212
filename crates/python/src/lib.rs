//! The extension module `mooncake._native`.
