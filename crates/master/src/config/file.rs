//! Configuration files (JSON, flat YAML), read into lists of names and values.

use std::path::Path;

use mooncake_base::{Error, Result, options::read_file};
use serde_json::Value;

use super::yaml;

/// Reads a configuration file. The extension of its name selects the format.
pub(super) fn read(path: &str) -> Result<Vec<(String, String)>> {
    let text = read_file(path)?;
    let ending = Path::new(path).extension().and_then(|ending| ending.to_str()).unwrap_or("");
    let value = match ending.to_ascii_lowercase().as_str() {
        "json" => parse_json(&text),
        "yaml" | "yml" => yaml::parse(&text),
        _ => Err(Error::invalid("a configuration file ends in .json, .yaml or .yml")),
    };
    value.and_then(entries).map_err(|error| error.with("file", path))
}

fn parse_json(text: &str) -> Result<Value> {
    serde_json::from_str(text)
        .map_err(|source| Error::invalid("the file is not valid JSON").caused_by(source))
}

fn entries(value: Value) -> Result<Vec<(String, String)>> {
    let Value::Object(fields) = value else {
        return Err(Error::invalid("the file is not a list of names and values"));
    };
    let entry = |(name, value)| match value {
        Value::String(text) => Ok((name, text)),
        Value::Bool(_) | Value::Number(_) => Ok((name, value.to_string())),
        _ => Err(Error::invalid("the value is not a string, number or boolean").with("key", name)),
    };
    fields.into_iter().map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_yaml(text: &str) -> Result<Vec<(String, String)>> {
        entries(yaml::parse(text)?)
    }

    fn read_json(text: &str) -> Result<Vec<(String, String)>> {
        entries(parse_json(text)?)
    }

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
        let mut expected = pairs(&expected);
        expected.sort();
        assert_eq!(read_yaml(text).unwrap(), expected);
    }

    #[test]
    fn nested_value_is_refused_by_its_key() {
        for text in ["a: 1\nb: [1]", "a: 1\nb:\n  c: 1"] {
            let error = read_yaml(text).unwrap_err().to_string();
            assert!(error.contains("key=b"), "{text:?}: {error}");
        }
        assert!(read_yaml("- a").is_err() && read_yaml("a").is_err());
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
