//! Configuration files (JSON, flat YAML), read into lists of names and values.

use std::path::Path;

use mooncake_base::{Error, Result, options::read_file};

/// Reads a configuration file. The extension of its name selects the format.
pub(super) fn read(path: &str) -> Result<Vec<(String, String)>> {
    let text = read_file(path)?;
    let ending = Path::new(path).extension().and_then(|ending| ending.to_str()).unwrap_or("");
    let entries = match ending.to_ascii_lowercase().as_str() {
        "json" => read_json(&text),
        "yaml" | "yml" => read_yaml(&text),
        _ => Err(Error::invalid("a configuration file ends in .json, .yaml or .yml")),
    };
    entries.map_err(|error| error.with("file", path))
}

fn read_json(text: &str) -> Result<Vec<(String, String)>> {
    let value: serde_json::Value = serde_json::from_str(text)
        .map_err(|source| Error::invalid("the file is not valid JSON").caused_by(source))?;
    let serde_json::Value::Object(fields) = value else {
        return Err(Error::invalid("the file is not a JSON object"));
    };
    fields
        .into_iter()
        .map(|(name, value)| match value {
            serde_json::Value::String(text) => Ok((name, text)),
            serde_json::Value::Bool(_) | serde_json::Value::Number(_) => {
                Ok((name, value.to_string()))
            }
            _ => {
                Err(Error::invalid("the value is not a string, number or boolean")
                    .with("key", name))
            }
        })
        .collect()
}

/// Reads `key: value` lines. Comments, quotes and a leading `---` are supported, nesting is not.
fn read_yaml(text: &str) -> Result<Vec<(String, String)>> {
    let mut entries = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let bad = |why: &str| Err(Error::invalid(why).with("line", number + 1));
        let content = line.trim_end();
        if content.trim().is_empty() || content.trim_start().starts_with('#') || content == "---" {
            continue;
        }
        if content.starts_with([' ', '\t', '-']) {
            return bad("only flat `key: value` lines are supported");
        }
        let Some((name, value)) = content.split_once(':') else {
            return bad("the line is not `key: value`");
        };
        let Some(value) = unquote(value.trim()) else {
            return bad("the quote of the value is not closed");
        };
        if value.starts_with(['[', '{', '|', '>', '&', '*']) {
            return bad("the value is not a string, number or boolean");
        }
        let name = name.trim().trim_matches(['"', '\'']);
        entries.push((name.to_owned(), value.to_owned()));
    }
    Ok(entries)
}

/// Strips quotes or a trailing comment; `None` if a quote is not closed.
fn unquote(value: &str) -> Option<&str> {
    for quote in ['"', '\''] {
        if let Some(rest) = value.strip_prefix(quote) {
            return rest.split_once(quote).map(|(inside, _)| inside);
        }
    }
    if value.starts_with('#') {
        return Some("");
    }
    Some(value.split_once(" #").map_or(value, |(before, _)| before.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(entries: &[(&str, &str)]) -> Vec<(String, String)> {
        entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn reads_flat_yaml_with_comments_and_quotes() {
        let text = "---\n# a comment\nrpc_port: 50052 # ours\nrpc_address: \"0.0.0.0\"\n\
                    enable_ha: false\ncluster_id: 'a b'\netcd_endpoints:\n";
        let expected = [
            ("rpc_port", "50052"),
            ("rpc_address", "0.0.0.0"),
            ("enable_ha", "false"),
            ("cluster_id", "a b"),
            ("etcd_endpoints", ""),
        ];
        assert_eq!(read_yaml(text).unwrap(), pairs(&expected));
    }

    #[test]
    fn nested_yaml_error_names_line() {
        for text in ["a: 1\n  b: 2", "a: 1\n- b", "a: 1\nb", "a: 1\nb: [1]", "a: 1\nb: \"x"] {
            let error = read_yaml(text).unwrap_err().to_string();
            assert!(error.contains("line=2"), "{text:?}: {error}");
        }
    }

    #[test]
    fn json_values_become_strings() {
        let entries = read_json(r#"{"port": 1, "x": "y", "on": true, "ratio": 0.5}"#).unwrap();
        let mut expected = pairs(&[("port", "1"), ("x", "y"), ("on", "true"), ("ratio", "0.5")]);
        expected.sort();
        let mut entries = entries;
        entries.sort();
        assert_eq!(entries, expected);
        for text in ["", "[1]", r#"{"a": {}}"#, r#"{"a": null}"#] {
            assert!(read_json(text).is_err(), "{text:?}");
        }
    }
}
