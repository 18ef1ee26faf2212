//! The quota file: a small YAML document that people write and the master rewrites.

use std::{collections::BTreeMap, fmt::Write as _, fs, io::Write as _, path::PathBuf};

use mooncake_base::{ByteSize, Error, ErrorCode, Result};
use serde_json::Value;

use super::yaml;

/// The maximum size of the file.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// An example of the file, on one line.
const FORM: &str = "`version: 1`, and below `tenants:` a list of `- name: chat` and `quota: 10GB`";

/// The quotas in the file.
#[derive(Debug)]
pub struct QuotaFile {
    path: PathBuf,
    quotas: BTreeMap<String, u64>,
}

impl QuotaFile {
    /// Reads the file.
    ///
    /// # Errors
    /// The file does not exist or is not a valid quota file; the error names the line.
    pub fn read(path: &str) -> Result<Self> {
        let failed = |source: std::io::Error| {
            Error::new(ErrorCode::FILE_READ_FAIL, "cannot read the quota file")
                .with("file", path)
                .caused_by(source)
        };
        let length = fs::metadata(path).map_err(failed)?.len();
        if length > FILE_BYTES_MAX {
            return Err(Error::invalid("the file is too large").with("file", path));
        }
        let text = fs::read_to_string(path).map_err(failed)?;
        let quotas = parse(&text).map_err(|error| error.with("file", path))?;
        Ok(Self { path: PathBuf::from(path), quotas })
    }

    /// Makes the file of these quotas, in place of an earlier one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn create(path: &str, quotas: impl IntoIterator<Item = (String, u64)>) -> Result<Self> {
        let file = Self { path: PathBuf::from(path), quotas: quotas.into_iter().collect() };
        file.write()?;
        Ok(file)
    }

    /// Returns each tenant with its quota in bytes.
    pub fn quotas(&self) -> impl Iterator<Item = (&str, u64)> {
        self.quotas.iter().map(|(name, &bytes)| (name.as_str(), bytes))
    }

    /// Sets or removes the quota of a tenant, and rewrites the file atomically.
    ///
    /// # Errors
    /// The file cannot be written; nothing has changed.
    pub fn set(&mut self, tenant: &str, bytes: Option<u64>) -> Result<()> {
        let earlier = self.insert(tenant, bytes);
        self.write().inspect_err(|_| {
            self.insert(tenant, earlier);
        })
    }

    fn insert(&mut self, tenant: &str, bytes: Option<u64>) -> Option<u64> {
        match bytes {
            Some(bytes) => self.quotas.insert(tenant.to_owned(), bytes),
            None => self.quotas.remove(tenant),
        }
    }

    fn write(&self) -> Result<()> {
        let failed = |source: std::io::Error| {
            Error::new(
                ErrorCode::FILE_WRITE_FAIL,
                "the quota file cannot be written; the quota stays as it was",
            )
            .with("file", self.path.display())
            .caused_by(source)
        };
        let beside = self.path.with_extension("new");
        let write = || {
            let mut file = fs::File::create(&beside)?;
            file.write_all(self.to_yaml().as_bytes())?;
            file.sync_all()?;
            fs::rename(&beside, &self.path)
        };
        write().map_err(failed)
    }

    fn to_yaml(&self) -> String {
        let mut text = "version: 1\n".to_owned();
        if self.quotas.is_empty() {
            return text + "tenants: []\n";
        }
        text.push_str("tenants:\n");
        for (name, bytes) in &self.quotas {
            // A JSON string is a valid YAML string.
            let name = Value::from(name.as_str());
            let _ = writeln!(text, "  - name: {name}\n    quota: {bytes}");
        }
        text
    }
}

/// Parses `version: 1` and a list of names with quotas, as YAML, which includes JSON.
fn parse(text: &str) -> Result<BTreeMap<String, u64>> {
    let document = yaml::parse(text)?;
    let tenants = match &document["tenants"] {
        Value::Array(tenants) => Some(&tenants[..]),
        Value::String(text) if text.is_empty() => Some(&[][..]),
        _ => None,
    };
    let is_known = document["version"].as_str() == Some("1");
    let tenants = if is_known { tenants } else { None };
    let Some(tenants) = tenants else {
        let why = match (is_known, &document["tenants"]) {
            (true, Value::Null) => "the quota file has no `tenants`",
            (true, _) => "`tenants` of the quota file is no list",
            (false, _) => "the quota file does not begin with `version: 1`",
        };
        return Err(Error::invalid(format!("{why}; it has the form {FORM}")));
    };
    check_fields(&document, &["version", "tenants"])?;
    let mut quotas = BTreeMap::new();
    for (tenant, number) in tenants.iter().zip(1..) {
        let field = |name: &str| tenant[name].as_str().map(str::to_owned);
        check_fields(tenant, &["name", "quota"])
            .and_then(|()| insert_quota(&mut quotas, field("name"), field("quota")))
            .map_err(|error| error.with("tenant_number", number))?;
    }
    Ok(quotas)
}

fn check_fields(mapping: &Value, known: &[&str]) -> Result<()> {
    let mut names = mapping.as_object().into_iter().flatten().map(|(name, _)| name);
    match names.find(|name| !known.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => {
            let name = name.clone();
            Err(Error::invalid("the field of the quota file is unknown").with("field", name))
        }
    }
}

fn insert_quota(
    quotas: &mut BTreeMap<String, u64>,
    name: Option<String>,
    quota: Option<String>,
) -> Result<()> {
    let (Some(name), Some(quota)) = (name, quota) else {
        return Err(Error::invalid("a tenant needs a name and a quota"));
    };
    let bytes = quota.parse::<ByteSize>()?.bytes();
    let is_name = !name.is_empty() && !name.starts_with('_') && !name.contains(char::is_control);
    if !is_name || bytes == 0 || i64::try_from(bytes).is_err() {
        let why = "a name is not empty, does not begin with '_' and has no control characters; a \
                   quota is positive";
        return Err(Error::invalid(why).with("name", name).with("quota", quota));
    }
    if quotas.insert(name.clone(), bytes).is_some() {
        return Err(Error::invalid("the tenant is listed twice").with("name", name));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<(String, u64)>> {
        Ok(parse(text)?.into_iter().collect())
    }

    #[test]
    fn reads_block_yaml_and_json() {
        let text = "---\n# who may write\nversion: 1\ntenants:\n  - name: a  # first\n    quota: 10GB\n  \
                    - quota: 5\n    name: \"b # c\"\n  -\n    name: 'd''e'\n    quota: 1.5 MB\n";
        let expected = [("a", 10 << 30), ("b # c", 5), ("d'e", 3 << 19)];
        assert_eq!(read(text).unwrap(), expected.map(|(name, bytes)| (name.to_owned(), bytes)));
        let json = r#"{"version": 1, "tenants": [{"name": "a", "quota": "1KB"}]}"#;
        assert_eq!(read(json).unwrap(), [("a".to_owned(), 1024)]);
        assert_eq!(read("version: 1\ntenants: []\n").unwrap(), []);
    }

    #[test]
    fn refuses_invalid_quota_file() {
        let tenant = |name: &str, quota: &str| {
            format!("version: 1\ntenants:\n  - name: {name}\n    quota: {quota}\n")
        };
        for text in [
            "",
            "tenants:\n",
            "version: 2\ntenants:\n",
            "version: 1\n",
            "version: 1\nversion: 1\ntenants:\n",
            "version: 1\ntenants:\n  - name: a\n",
            "version: 1\n  - name: a\n    quota: 1\n",
            "version: 1\ntenants:\n  - name: a\n    quota: 1\n    size: 3\n",
            "version: 1\ntenants:\n  - name: a\n    quota: 1\n  - name: a\n    quota: 2\n",
            &tenant("a", "0"),
            &tenant("a", "-1"),
            &tenant("a", "many"),
            &tenant("_a", "1"),
            &tenant("''", "1"),
            &tenant("\"a\\u0007\"", "1"),
            &tenant("\"a", "1"),
            "{\"version\": 1}",
            "{",
        ] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn refusal_shows_the_form() {
        for (text, why) in [
            ("", "does not begin with `version: 1`"),
            ("version: 1\ntenants: {}\n", "`tenants` of the quota file is no list"),
            ("version: 1\n", "has no `tenants`"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
            assert!(error.contains("a list of `- name: chat` and `quota: 10GB`"), "{error}");
            assert!(!error.contains('\n') && !error.contains("  "), "{error}");
        }
    }

    #[test]
    fn written_file_reads_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("quotas.yaml");
        fs::write(&path, "version: 1\ntenants:\n  - name: a\n    quota: 1KB\n").unwrap();
        let path = path.to_str().unwrap();
        let mut file = QuotaFile::read(path).unwrap();
        file.set("b \"#\" c", Some(7)).unwrap();
        file.set("a", None).unwrap();
        let again = QuotaFile::read(path).unwrap();
        assert_eq!(again.quotas().collect::<Vec<_>>(), [("b \"#\" c", 7)]);
        file.set("b \"#\" c", None).unwrap();
        assert_eq!(QuotaFile::read(path).unwrap().quotas().count(), 0);
        assert!(QuotaFile::read("/nowhere/at/all").is_err());
    }
}
