//! The program `transfer_engine_topology_dump`, which prints the topology of network devices and
//! memory.

use std::{collections::BTreeSet, path::Path};

use mooncake_base::{
    Error, Result,
    options::{self, OptionSpec, resolve},
    parse::read_bool,
};
use mooncake_cli::{CliCommand, Program, print_flush};
use mooncake_settings::engine::custom_topology;
use mooncake_transfer_engine::Topology;

const PROGRAM: Program = Program {
    name: "transfer_engine_topology_dump",
    version: env!("CARGO_PKG_VERSION"),
    error_prefix: "transfer_engine_topology_dump",
};
const PURPOSE: &str = "prints which network devices are close to which memory of this machine";

#[derive(Debug, Default)]
struct Settings {
    device_name: String,
    backend: String,
    is_custom: bool,
    custom_path: String,
}

const fn text(
    name: &'static str,
    help: &'static str,
    set: fn(&mut Settings, &str) -> Result<()>,
    show: fn(&Settings) -> String,
) -> OptionSpec<Settings> {
    OptionSpec { name, aliases: &[], env: None, is_switch: false, help, set, show }
}

#[rustfmt::skip] // A table: one option a line where it fits.
const OPTIONS: &[OptionSpec<Settings>] = &[
    text("device_name", "Shows only these network devices; a list of names separated by commas.",
        |s, t| { t.clone_into(&mut s.device_name); Ok(()) }, |s| s.device_name.clone()),
    text("backend", "Output format: auto or te. The format of the engine tent is not supported.",
        |s, t| { s.backend = backend(t)?; Ok(()) },
        |s| if s.backend.is_empty() { "auto".to_owned() } else { s.backend.clone() }),
    OptionSpec {
        is_switch: true,
        ..text("use_custom_topo", "Shows the topology file that MC_CUSTOM_TOPO_JSON names.",
            |s, t| { s.is_custom = read_bool(t)?; Ok(()) }, |s| s.is_custom.to_string())
    },
    text("custom_topo_json", "Shows this topology file.",
        |s, t| { t.clone_into(&mut s.custom_path); Ok(()) }, |s| s.custom_path.clone()),
];

/// Runs the program with these arguments (without its own name) and returns its exit code.
pub fn run(arguments: Vec<String>) -> u8 {
    PROGRAM.run(
        from_arguments(arguments),
        || options::help(OPTIONS, PROGRAM.name, PURPOSE),
        |settings| {
            print_flush(&format!("{}\n", dump(&settings)?));
            Ok(())
        },
    )
}

fn from_arguments(arguments: Vec<String>) -> Result<CliCommand<Settings>> {
    CliCommand::read(OPTIONS, arguments)?
        .and_then(|assignments| resolve(OPTIONS, &[], |_| None, &assignments))
}

fn dump(settings: &Settings) -> Result<String> {
    let (topology, from) = match (settings.custom_path.as_str(), settings.is_custom) {
        ("", false) => (local(&settings.device_name)?, "discover"),
        ("", true) => {
            let path = custom_topology().ok_or_else(|| {
                Error::invalid("--use-custom-topo needs MC_CUSTOM_TOPO_JSON or --custom-topo-json")
            })?;
            (Topology::from_file(Path::new(&path))?, "custom")
        }
        (path, _) => (Topology::from_file(Path::new(path))?, "custom"),
    };
    Ok(format!("Local topology [te/{from}]: {}", topology.to_json()))
}

/// Returns the topology of this machine with the named devices only.
fn local(wanted: &str) -> Result<Topology> {
    let all = Topology::local("");
    let devices = all.locations().flat_map(|(_, near, far)| near.iter().chain(far));
    let found: BTreeSet<&str> = devices.map(String::as_str).collect();
    let names = wanted.split(',').map(str::trim).filter(|name| !name.is_empty());
    let missing: Vec<_> = names.filter(|name| !found.contains(name)).collect();
    if missing.is_empty() {
        return Ok(Topology::local(wanted));
    }
    let why = if found.is_empty() {
        "this machine has no RDMA device"
    } else {
        "this machine has no RDMA device of that name"
    };
    let error = Error::invalid(why).with("device_name", missing.join(","));
    Err(if found.is_empty() { error } else { error.with("found", Vec::from_iter(found).join(",")) })
}

fn backend(text: &str) -> Result<String> {
    match text {
        "auto" | "te" => Ok(text.to_owned()),
        _ => Err(Error::invalid("the backend must be auto or te").with("backend", text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dumped(arguments: &[&str]) -> Result<String> {
        match from_arguments(arguments.iter().map(|word| (*word).to_owned()).collect())? {
            CliCommand::Run(settings) => dump(&settings),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn prints_the_local_topology_with_its_source() {
        for arguments in [&[][..], &["--backend", "te", "--device-name="], &["--backend=auto"]] {
            let text = dumped(arguments).unwrap();
            let json = text.strip_prefix("Local topology [te/discover]: ").unwrap();
            let topology = Topology::from_json(json.as_bytes()).unwrap();
            assert!(topology.locations().any(|(name, _, _)| name == "cpu:0"), "{text}");
        }
    }

    #[test]
    fn prints_a_custom_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.json");
        std::fs::write(&path, r#"{"cpu:0":[["a"],["b"]]}"#).unwrap();
        let path = path.to_str().unwrap();
        let text = dumped(&["--use-custom-topo", "--custom-topo-json", path]).unwrap();
        assert!(text.starts_with("Local topology [te/custom]: {"), "{text}");
        assert!(text.contains("\"a\""), "{text}");
    }

    #[test]
    fn rejects_invalid_arguments() {
        for arguments in [
            &["--backend=tent"][..],
            &["--custom-topo-json=/nowhere/t.json"],
            &["word"],
            &["--devices=x"],
            &["--device-name=no-such-device"],
        ] {
            assert!(dumped(arguments).is_err(), "{arguments:?}");
        }
        assert_eq!(run(vec!["--backend=tent".to_owned()]), 1);
        assert_eq!(run(vec!["--help".to_owned()]), 0);
    }
}
