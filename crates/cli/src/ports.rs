//! The file with the ports that a program listens on, for callers that let it choose free ports.

use std::{fs, io::Write as _, path::PathBuf, process::id};

use mooncake_base::{Error, ErrorCode, Result};
use serde_json::Value;

/// The ports file of a running program; removed on drop, if the program still owns it.
#[derive(Debug)]
pub struct PortsFile {
    path: PathBuf,
    text: String,
}

impl PortsFile {
    /// Writes the file atomically. Returns `None` if the path is empty. The content holds the process
    /// id, so that the files of two programs differ.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(path: &str, content: &Value) -> Result<Option<Self>> {
        if path.is_empty() {
            return Ok(None);
        }
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
        // Another process may have taken over the path; its file must stay.
        if fs::read_to_string(&self.path).is_ok_and(|text| text == self.text) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn file_is_written_whole_and_removed_on_drop() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ports.json");
        let content = json!({"pid": id(), "rpc_port": 50052});
        let file = PortsFile::write(path.to_str().unwrap(), &content).unwrap().unwrap();
        let shown: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(shown, content);
        drop(file);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "no draft is left either");
    }

    #[test]
    fn file_of_another_program_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ports.json");
        let file = PortsFile::write(path.to_str().unwrap(), &json!({"pid": id()})).unwrap();
        fs::write(&path, "{}").unwrap();
        drop(file);
        assert!(path.exists());
    }

    #[test]
    fn unwritable_path_is_named() {
        let nothing = json!({});
        let error = PortsFile::write("/nowhere/ports.json", &nothing).unwrap_err().to_string();
        assert!(error.contains("/nowhere/ports.json") && error.contains("ports_file"), "{error}");
        assert!(PortsFile::write("", &nothing).unwrap().is_none());
    }
}
