//! The quota file: a small YAML document that people write and the master rewrites.

use std::{collections::BTreeMap, fmt::Write as _, fs, io::Write as _, path::PathBuf};

use mooncake_base::{ByteSize, Error, ErrorCode, Result};

/// The maximum size of the file.
const FILE_BYTES_MAX: u64 = 16 << 20;

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

    /// Returns each tenant with its quota in bytes.
    pub fn quotas(&self) -> impl Iterator<Item = (&str, u64)> {
        self.quotas.iter().map(|(name, &bytes)| (name.as_str(), bytes))
    }

    /// Sets or removes the quota of a tenant, and rewrites the file atomically.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn set(&mut self, tenant: &str, bytes: Option<u64>) -> Result<()> {
        match bytes {
            Some(bytes) => self.quotas.insert(tenant.to_owned(), bytes),
            None => self.quotas.remove(tenant),
        };
        let failed = |source: std::io::Error| {
            Error::new(
                ErrorCode::FILE_WRITE_FAIL,
                "the quotas are in effect but cannot be written to the quota file",
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
            let name = serde_json::Value::from(name.as_str());
            let _ = writeln!(text, "  - name: {name}\n    quota: {bytes}");
        }
        text
    }
}

/// Parses `version: 1` and a list of names with quotas, in block style or as JSON.
fn parse(text: &str) -> Result<BTreeMap<String, u64>> {
    if text.trim_start().starts_with('{') {
        return from_json(text);
    }
    let mut version = None;
    let mut has_tenants = false;
    let mut entries: Vec<(usize, Entry)> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let bad = |why: &str| Error::invalid(why).with("line", number + 1);
        let content = without_comment(line).trim_end();
        if content.trim().is_empty() || content == "---" {
            continue;
        }
        let is_nested = content.starts_with([' ', '\t', '-']);
        let mut body = content.trim_start();
        if is_nested && !has_tenants {
            return Err(bad("only `tenants` may have nested lines"));
        }
        if let Some(rest) = body.strip_prefix('-') {
            entries.push((number + 1, Entry::default()));
            body = rest.trim_start();
            if body.is_empty() {
                continue;
            }
        }
        let (field, value) =
            body.split_once(':').ok_or_else(|| bad("the line is not `key: value`"))?;
        let (field, value) = (field.trim(), value.trim());
        match (is_nested, field, entries.last_mut()) {
            (false, "version", _) if version.is_none() => version = Some(unquoted(value)?),
            (false, "tenants", _) if !has_tenants && ["", "[]"].contains(&value) => {
                has_tenants = true;
            }
            (true, "name", Some((_, entry))) if entry.name.is_none() => {
                entry.name = Some(unquoted(value)?);
            }
            (true, "quota", Some((_, entry))) if entry.quota.is_none() => {
                entry.quota = Some(unquoted(value)?);
            }
            _ => return Err(bad("the field is unknown or repeated").with("field", field)),
        }
    }
    check_version(version.as_deref() == Some("1"), has_tenants)?;
    let mut quotas = BTreeMap::new();
    for (line, Entry { name, quota }) in entries {
        insert_quota(&mut quotas, name, quota).map_err(|error| error.with("line", line))?;
    }
    Ok(quotas)
}

/// A partly read entry of a tenant.
#[derive(Default)]
struct Entry {
    name: Option<String>,
    quota: Option<String>,
}

fn from_json(text: &str) -> Result<BTreeMap<String, u64>> {
    let value: serde_json::Value = serde_json::from_str(text)
        .map_err(|source| Error::invalid("the quota file is not valid JSON").caused_by(source))?;
    let tenants = value["tenants"].as_array();
    check_version(value["version"] == 1, tenants.is_some())?;
    let mut quotas = BTreeMap::new();
    for tenant in tenants.into_iter().flatten() {
        let field = |name: &str| match &tenant[name] {
            serde_json::Value::String(text) => Some(text.clone()),
            serde_json::Value::Number(number) => Some(number.to_string()),
            _ => None,
        };
        insert_quota(&mut quotas, field("name"), field("quota"))?;
    }
    Ok(quotas)
}

fn check_version(is_one: bool, has_tenants: bool) -> Result<()> {
    if is_one && has_tenants {
        return Ok(());
    }
    Err(Error::invalid("a quota file needs `version: 1` and `tenants`"))
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

/// Returns the line up to a `#` that is outside of quotes, at the start or after a blank.
fn without_comment(line: &str) -> &str {
    let mut quote = None;
    let mut before = ' ';
    for (at, c) in line.char_indices() {
        match quote {
            None if c == '#' && before.is_whitespace() => return &line[..at],
            None if c == '"' || c == '\'' => quote = Some(c),
            Some(open) if open == c && before != '\\' => quote = None,
            _ => {}
        }
        before = c;
    }
    line
}

fn unquoted(value: &str) -> Result<String> {
    let bad = || Error::invalid("the value is not a string or number").with("value", value);
    if value.starts_with('"') {
        return serde_json::from_str(value).map_err(|_| bad());
    }
    if let Some(inner) = value.strip_prefix('\'') {
        return inner.strip_suffix('\'').map(|inner| inner.replace("''", "'")).ok_or_else(bad);
    }
    if value.is_empty() || value.starts_with(['[', '{', '|', '>', '&', '*', '!']) {
        return Err(bad());
    }
    Ok(value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<(String, u64)>> {
        Ok(parse(text)?.into_iter().collect())
    }

    #[test]
    fn reads_block_yaml_and_json() {
        let text = "---\n# who may write\nversion: 1\ntenants:\n  - name: a  # first\n    quota: 10GB\n\
                    - quota: 5\n  name: \"b # c\"\n  -\n    name: 'd''e'\n    quota: 1.5 MB\n";
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
