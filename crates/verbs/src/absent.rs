//! Stub of the library for builds without the feature `rdma`.

use std::sync::Arc;

use crate::{Error, Result};

/// The loaded library. This build has none, so the type has no values.
#[derive(Debug, Clone, Copy)]
pub enum Library {}

impl Library {
    /// Fails, since this build has no RDMA.
    ///
    /// # Errors
    /// Always [`Error::NotBuilt`].
    pub fn load() -> Result<Arc<Self>> {
        Err(Error::NotBuilt)
    }

    /// Returns the names of the devices.
    ///
    /// # Errors
    /// None: no value of this type exists.
    pub fn device_names(self: &Arc<Self>) -> Result<Vec<String>> {
        match **self {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_fails_without_rdma_feature() {
        assert!(matches!(Library::load(), Err(Error::NotBuilt)));
        let message = crate::device_names().unwrap_err().to_string();
        assert!(message.contains("feature rdma"), "{message}");
    }
}
