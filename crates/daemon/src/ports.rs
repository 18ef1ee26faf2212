//! The file that tells where a daemon listens, for those who started it with a free port.

use std::{fs, io::Write as _, path::PathBuf, process::id};

use mooncake_base::{Error, ErrorCode, Result};
use serde_json::json;

use crate::daemon::Daemon;

/// The file while the daemon serves; removed when dropped, if it is still that daemon's.
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
    pub(crate) fn write(path: &str, daemon: &Daemon) -> Result<Option<Self>> {
        if path.is_empty() {
            return Ok(None);
        }
        let content = json!({
            "pid": id(),
            "rpc": daemon.address().to_string(),
            "rpc_port": daemon.address().port(),
            "name": daemon.client().name(),
            "http": daemon.http_address().map(|address| address.to_string()),
            "http_port": daemon.http_address().map(|address| address.port()),
        });
        let file = Self { path: PathBuf::from(path), text: format!("{content}\n") };
        let mut draft = file.path.clone().into_os_string();
        draft.push(format!(".{}", id()));
        let written = fs::File::create(&draft)
            .and_then(|mut draft| draft.write_all(file.text.as_bytes()))
            .and_then(|()| fs::rename(&draft, &file.path));
        if written.is_err() {
            let _ = fs::remove_file(&draft);
        }
        written.map_err(|source| {
            Error::new(ErrorCode::FILE_WRITE_FAIL, "the file of ports cannot be written")
                .with("option", "ports_file")
                .with("file", path)
                .caused_by(source)
        })?;
        Ok(Some(file))
    }
}

impl Drop for PortsFile {
    fn drop(&mut self) {
        // Another daemon may have taken the path over; that file is not ours to remove.
        if fs::read_to_string(&self.path).is_ok_and(|text| text == self.text) {
            let _ = fs::remove_file(&self.path);
        }
    }
}
