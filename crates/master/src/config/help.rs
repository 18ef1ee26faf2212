//! The help text: options in groups, with their defaults, wrapped for a terminal.

use std::fmt::Write as _;

use mooncake_base::options::META_FLAGS;

use super::{MasterConfig, OPTIONS};

/// The maximum width of a line.
const WIDTH: usize = 96;

/// The first option of each group, and the title of the group. An option belongs to the last group
/// that begins before it in the table.
const GROUPS: &[(&str, &str)] = &[
    ("config_path", "Listening"),
    ("metrics_host", "Admin: HTTP, metrics, log"),
    ("enable_http_metadata_server", "Metadata server of the transfer engines"),
    ("default_kv_lease_ttl", "Leases and pins"),
    ("eviction_ratio", "Eviction"),
    ("client_ttl", "Clients and unfinished puts"),
    ("allocation_strategy", "Placement and names"),
    ("state_dir", "Durability: what a restart remembers"),
    ("enable_ha", "Several masters"),
    ("enable_kv_events", "Object events"),
    ("memory_allocator", "Unsupported features: accepted, without effect"),
    ("logtostderr", "Log flags of upstream's program: accepted, without effect"),
];

/// Returns the whole help text.
pub(crate) fn text(program: &str) -> String {
    let defaults = MasterConfig::default();
    let mut text = format!(
        "{program} manages the pool: it allocates memory, locates objects and evicts them.\n\n\
         Usage: {program} [--option=value …]\n\n\
         Options may have one dash or two, `=` or a space before the value, `-` or `_` in the name;\n\
         a switch needs no value; --noNAME turns it off. They are read from the command line, then from\n\
         the variables named below, then from the file of --config_path.\n",
    );
    for spec in OPTIONS {
        if let Some((_, title)) = GROUPS.iter().find(|(first, _)| *first == spec.name) {
            let _ = write!(text, "\n{title}\n");
        }
        let default = (spec.show)(&defaults);
        let kind = if spec.is_switch { "" } else { "=…" };
        let default = match &default[..] {
            "" => String::new(),
            default => format!("  (default: {default})"),
        };
        let _ = writeln!(text, "  --{}{kind}{default}", spec.name);
        wrap(&mut text, spec.help);
        if !spec.aliases.is_empty() {
            wrap(&mut text, &format!("Also: --{}.", spec.aliases.join(", --")));
        }
        if let Some(variable) = spec.env {
            wrap(&mut text, &format!("Environment: {}.", variable.name));
        }
    }
    text.push_str("\nOptions about options\n");
    for (flag, help) in META_FLAGS {
        let _ = writeln!(text, "  {flag}");
        wrap(&mut text, help);
    }
    text
}

/// Appends the sentence, indented and wrapped to lines of at most [`WIDTH`].
fn wrap(text: &mut String, sentence: &str) {
    const INDENT: &str = "      ";
    let mut length = 0;
    for word in sentence.split_whitespace() {
        let width = word.chars().count();
        if length == 0 || length + 1 + width > WIDTH {
            text.push_str(if length == 0 { INDENT } else { "\n      " });
            length = INDENT.len() + width;
        } else {
            text.push(' ');
            length += 1 + width;
        }
        text.push_str(word);
    }
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_lists_every_option_and_group() {
        let text = text("mooncake_master");
        for spec in OPTIONS {
            assert!(text.contains(&format!("\n  --{}", spec.name)), "{}", spec.name);
        }
        for (first, title) in GROUPS {
            assert!(OPTIONS.iter().any(|spec| spec.name == *first), "{first}");
            assert!(text.contains(&format!("\n{title}\n")), "{title}");
        }
    }

    #[test]
    fn help_lines_fit_terminal() {
        for line in text("mooncake_master").lines() {
            assert!(line.chars().count() <= WIDTH + 4, "{line}");
        }
    }
}
