//! YAML documents as JSON values whose scalars are strings, for files that people write.

use mooncake_base::{Error, Result};
use saphyr_parser::{Event, Parser, ScalarStyle};
use serde_json::{Map, Value};

/// The maximum nesting of lists and mappings.
const DEPTH_MAX: usize = 16;

/// A list or mapping that has not ended yet.
enum OpenNode {
    List(Vec<Value>),
    /// With the key whose value comes next.
    Mapping(Map<String, Value>, Option<String>),
}

/// Parses a document. A mapping has unique keys; there are no aliases, which could make a short file
/// a large value. An empty document is an empty mapping, a null is an empty string.
///
/// # Errors
/// The text is not such a document; the error names the line.
pub(super) fn parse(text: &str) -> Result<Value> {
    let mut document = None;
    let mut open: Vec<OpenNode> = Vec::new();
    for event in Parser::new_from_str(text) {
        let (event, at) = event.map_err(|error| {
            Error::invalid("the file is not valid YAML")
                .with("line", error.marker().line())
                .with("why", error.info())
        })?;
        let bad = |why: &str| Error::invalid(why).with("line", at.start.line());
        let value = match event {
            Event::Scalar(text, ScalarStyle::Plain, ..) if text == "~" => String::new().into(),
            Event::Scalar(text, ..) => text.into_owned().into(),
            Event::SequenceStart(..) | Event::MappingStart(..) if open.len() == DEPTH_MAX => {
                return Err(bad("the file is nested too deeply").with("limit", DEPTH_MAX));
            }
            Event::SequenceStart(..) => {
                open.push(OpenNode::List(Vec::new()));
                continue;
            }
            Event::MappingStart(..) => {
                open.push(OpenNode::Mapping(Map::new(), None));
                continue;
            }
            Event::SequenceEnd | Event::MappingEnd => match open.pop() {
                Some(OpenNode::List(values)) => values.into(),
                Some(OpenNode::Mapping(fields, _)) => fields.into(),
                None => continue,
            },
            Event::Alias(_) => return Err(bad("aliases are not supported")),
            _ => continue,
        };
        match (open.last_mut(), value) {
            (None, value) if document.is_none() => document = Some(value),
            (None, _) => return Err(bad("the file has more than one document")),
            (Some(OpenNode::List(values)), value) => values.push(value),
            (Some(OpenNode::Mapping(_, key @ None)), Value::String(text)) => *key = Some(text),
            (Some(OpenNode::Mapping(_, None)), _) => return Err(bad("a key is not a string")),
            (Some(OpenNode::Mapping(fields, key)), value) => {
                let key = key.take().unwrap_or_default();
                if fields.contains_key(&key) {
                    return Err(bad("the key is repeated").with("key", key));
                }
                fields.insert(key, value);
            }
        }
    }
    Ok(document.unwrap_or_else(|| Map::new().into()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn scalars_are_strings() {
        let text = "---\n# a comment\na: 1 # one\nb: \"#2\"\nc: 'd''e'\nf:\ng: [x, {y: ~}]\n";
        let expected = json!({"a": "1", "b": "#2", "c": "d'e", "f": "", "g": ["x", {"y": ""}]});
        assert_eq!(parse(text).unwrap(), expected);
        assert_eq!(parse(r#"{"a": 1, "b": ["\u0041"]}"#).unwrap(), json!({"a": "1", "b": ["A"]}));
        assert_eq!(parse("# nothing").unwrap(), json!({}));
    }

    #[test]
    fn error_names_line() {
        let deep = format!("a: 1\nb: {}", "[".repeat(DEPTH_MAX));
        for text in [
            "a: 1\n  b: 2",
            "a: 1\n- b",
            "a: 1\na: 2",
            "a: &x 1\nb: *x",
            "a: 1\nb: \"x",
            "a: 1\n[b]: 2",
            "a: 1\n--- {}",
            &deep,
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains("line=2") || error.contains("line=3"), "{text:?}: {error}");
        }
    }
}
