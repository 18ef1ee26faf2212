//! What stands for the library in a build without the feature `rdma`.

use std::sync::Arc;

use crate::{Error, Result};

/// The loaded library; in this build there is none, so that no value of it exists.
#[derive(Debug, Clone, Copy)]
pub enum Library {}

impl Library {
    /// Says that this build has no RDMA.
    ///
    /// # Errors
    /// Always [`Error::NotBuilt`].
    pub fn load() -> Result<Arc<Self>> {
        Err(Error::NotBuilt)
    }

    /// The names of the devices.
    ///
    /// # Errors
    /// None: there is no library to ask.
    pub fn device_names(self: &Arc<Self>) -> Result<Vec<String>> {
        match **self {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loading_says_that_the_build_has_no_rdma() {
        assert!(matches!(Library::load(), Err(Error::NotBuilt)));
        let message = crate::device_names().unwrap_err().to_string();
        assert!(message.contains("feature rdma"), "{message}");
    }
}
