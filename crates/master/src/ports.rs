//! The file that tells where a master listens, for those who started it with free ports.

use std::{fs, io::Write as _, path::PathBuf, process::id};

use mooncake_base::{Error, ErrorCode, Result};
use serde_json::json;

use crate::addresses::Addresses;

/// The file while the master serves; removed when dropped, if it is still that master's.
#[derive(Debug)]
pub(crate) struct PortsFile {
    path: PathBuf,
    text: String,
}

impl PortsFile {
    /// Writes it whole: a reader sees all of it or none. `None` without a path.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn write(path: &str, addresses: &Addresses) -> Result<Option<Self>> {
        if path.is_empty() {
            return Ok(None);
        }
        let text = |address: Option<std::net::SocketAddr>| address.map(|a| a.to_string());
        let content = json!({
            "pid": id(),
            "rpc": addresses.rpc.to_string(),
            "rpc_port": addresses.rpc.port(),
            "admin": text(addresses.admin),
            "metrics_port": addresses.admin.map(|a| a.port()),
            "metadata": text(addresses.metadata),
            "http_metadata_server_port": addresses.metadata.map(|a| a.port()),
            "events": text(addresses.events),
        });
        let file = Self { path: PathBuf::from(path), text: format!("{content}\n") };
        let failed = |source: std::io::Error| {
            Error::new(ErrorCode::FILE_WRITE_FAIL, "the file of ports cannot be written")
                .with("option", "ports_file")
                .with("file", path)
                .caused_by(source)
        };
        let mut draft = file.path.clone().into_os_string();
        draft.push(format!(".{}", id()));
        let written = fs::File::create(&draft)
            .and_then(|mut draft| draft.write_all(file.text.as_bytes()))
            .and_then(|()| fs::rename(&draft, &file.path));
        if written.is_err() {
            let _ = fs::remove_file(&draft);
        }
        written.map_err(failed)?;
        Ok(Some(file))
    }
}

impl Drop for PortsFile {
    fn drop(&mut self) {
        // Another master may have taken the path over; that file is not ours to remove.
        if fs::read_to_string(&self.path).is_ok_and(|text| text == self.text) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses() -> Addresses {
        let rpc = "127.0.0.1:50052".parse().unwrap();
        Addresses {
            rpc,
            admin: Some("127.0.0.1:9004".parse().unwrap()),
            metadata: None,
            events: None,
        }
    }

    #[test]
    fn the_file_names_what_is_bound_and_goes_with_the_master() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ports.json");
        let file = PortsFile::write(path.to_str().unwrap(), &addresses()).unwrap().unwrap();
        let shown: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(
            (&shown["rpc"], &shown["metrics_port"]),
            (&json!("127.0.0.1:50052"), &json!(9004))
        );
        assert_eq!((&shown["metadata"], &shown["pid"]), (&json!(null), &json!(id())));
        drop(file);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "no draft is left either");
    }

    #[test]
    fn a_file_that_another_master_wrote_since_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ports.json");
        let file = PortsFile::write(path.to_str().unwrap(), &addresses()).unwrap();
        fs::write(&path, "{}").unwrap();
        drop(file);
        assert!(path.exists());
    }

    #[test]
    fn a_path_that_cannot_be_written_is_named() {
        let error = PortsFile::write("/nowhere/ports.json", &addresses()).unwrap_err().to_string();
        assert!(error.contains("/nowhere/ports.json") && error.contains("ports_file"), "{error}");
        assert!(PortsFile::write("", &addresses()).unwrap().is_none());
    }
}
