//! The options of the benchmark: upstream's flags, and additional ones for reports.
//!
//! Upstream's defaults of the address flags name the hosts of one laboratory. The defaults here
//! work on a single host, except for the segment, which must be given.

use std::time::Duration;

use mooncake_base::{
    Error, Result,
    options::OptionSpec,
    parse::{read_bool, read_number, read_seconds, read_size},
};

/// The role of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Initiator,
    Target,
}

/// The settings of the benchmark.
#[derive(Debug, Clone)]
pub(super) struct BenchConfig {
    pub(super) mode: Mode,
    pub(super) local_server_name: String,
    pub(super) metadata_server: String,
    pub(super) segment_id: String,
    pub(super) protocol: String,
    pub(super) device_name: String,
    pub(super) nic_priority_matrix: String,
    pub(super) is_auto_discovering: bool,
    pub(super) is_writing: bool,
    pub(super) block_bytes: u64,
    pub(super) batch_size: usize,
    pub(super) threads: usize,
    pub(super) buffer_bytes: u64,
    pub(super) duration: Duration,
    pub(super) unit: Unit,
    pub(super) precision: usize,
    pub(super) backend: String,
    pub(super) is_json: bool,
    pub(super) report: String,
}

/// A unit of throughput: its name and its size in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Unit {
    pub(super) name: &'static str,
    pub(super) bytes: f64,
}

const UNITS: [Unit; 9] = [
    Unit { name: "GB", bytes: 1e9 },
    Unit { name: "GiB", bytes: 1073741824.0 },
    Unit { name: "Gb", bytes: 1e9 / 8.0 },
    Unit { name: "MB", bytes: 1e6 },
    Unit { name: "MiB", bytes: 1048576.0 },
    Unit { name: "Mb", bytes: 1e6 / 8.0 },
    Unit { name: "KB", bytes: 1e3 },
    Unit { name: "KiB", bytes: 1024.0 },
    Unit { name: "Kb", bytes: 1e3 / 8.0 },
];

/// Upper limits, which large machines stay below and typing errors exceed.
const THREADS_MAX: usize = 1024;
const BATCH_MAX: usize = 1 << 20;
const PRECISION_MAX: usize = 12;

impl Default for BenchConfig {
    fn default() -> Self {
        Self {
            mode: Mode::Initiator,
            local_server_name: String::new(),
            metadata_server: "P2PHANDSHAKE".to_owned(),
            segment_id: String::new(),
            protocol: "tcp".to_owned(),
            device_name: String::new(),
            nic_priority_matrix: String::new(),
            is_auto_discovering: false,
            is_writing: false,
            block_bytes: 65536,
            batch_size: 128,
            threads: 12,
            buffer_bytes: 1 << 30,
            duration: Duration::from_secs(10),
            unit: UNITS[0],
            precision: 2,
            backend: "classic".to_owned(),
            is_json: false,
            report: String::new(),
        }
    }
}

impl BenchConfig {
    /// Returns the names of the RDMA devices, if they are to be used.
    pub(super) fn rdma_devices(&self) -> Option<&str> {
        let devices = if self.is_auto_discovering { "" } else { &self.device_name };
        self.protocol.eq_ignore_ascii_case("rdma").then_some(devices)
    }

    /// Checks the settings against each other.
    ///
    /// # Errors
    /// The settings contradict each other, or the segment is missing.
    pub(super) fn check(&self) -> Result<()> {
        if self.mode == Mode::Target {
            return Ok(());
        }
        let wanted = self.block_bytes.saturating_mul(self.batch_size as u64);
        if wanted > self.buffer_bytes {
            return Err(Error::invalid("a batch does not fit into the buffer")
                .with("block_size", self.block_bytes)
                .with("batch_size", self.batch_size)
                .with("buffer_size", self.buffer_bytes));
        }
        if self.segment_id.is_empty() {
            let text = "no target: pass --segment_id=ADDRESS, which the target prints";
            return Err(Error::invalid(text));
        }
        Ok(())
    }
}

type Spec = OptionSpec<BenchConfig>;
type Set = fn(&mut BenchConfig, &str) -> Result<()>;
type Show = fn(&BenchConfig) -> String;

const fn value(name: &'static str, help: &'static str, set: Set, show: Show) -> Spec {
    OptionSpec { name, aliases: &[], env: None, is_switch: false, help, set, show }
}

const fn switch(name: &'static str, help: &'static str, set: Set, show: Show) -> Spec {
    OptionSpec { name, aliases: &[], env: None, is_switch: true, help, set, show }
}

/// All options, in the order of the help text.
#[rustfmt::skip] // A table: one option a line where it fits.
pub(super) const OPTIONS: &[Spec] = &[
    value("mode", "initiator moves bytes; target registers memory until a signal stops it.",
        |c, t| one_of(t, &["initiator", "target"]).map(|at| c.mode = [Mode::Initiator, Mode::Target][at]),
        |c| if c.mode == Mode::Initiator { "initiator" } else { "target" }.to_owned()),
    value("local_server_name", "Name of this process: host or host:port; empty for its address.",
        |c, t| text(t, &mut c.local_server_name), |c| c.local_server_name.clone()),
    value("metadata_server", "P2PHANDSHAKE, or the address of a metadata server.",
        |c, t| text(t, &mut c.metadata_server), |c| c.metadata_server.clone()),
    value("segment_id", "Segment of the target: the address that it prints, or its name.",
        |c, t| text(t, &mut c.segment_id), |c| c.segment_id.clone()),
    value("protocol", "rdma uses RDMA devices between hosts. Otherwise the engine picks the transport; MC_FORCE_TCP=1 leaves only TCP.",
        |c, t| text(t, &mut c.protocol), |c| c.protocol.clone()),
    value("device_name", "Names of the RDMA devices, separated by commas; empty: all that are active.",
        |c, t| text(t, &mut c.device_name), |c| c.device_name.clone()),
    value("nic_priority_matrix", "(no effect) MC_CUSTOM_TOPO_JSON names such a file.",
        |c, t| text(t, &mut c.nic_priority_matrix), |c| c.nic_priority_matrix.clone()),
    switch("auto_discovery", "Uses all RDMA devices, whatever device_name says.",
        |c, t| read_bool(t).map(|on| c.is_auto_discovering = on),
        |c| c.is_auto_discovering.to_string()),
    value("operation", "Operation: read or write.",
        |c, t| one_of(t, &["read", "write"]).map(|at| c.is_writing = at == 1),
        |c| if c.is_writing { "write" } else { "read" }.to_owned()),
    value("block_size", "Bytes per transfer entry.",
        |c, t| bytes(t).map(|n| c.block_bytes = n), |c| c.block_bytes.to_string()),
    value("batch_size", "Transfer entries per batch.",
        |c, t| count(t, BATCH_MAX).map(|n| c.batch_size = n), |c| c.batch_size.to_string()),
    value("threads", "Threads, each of which moves batches one after another.",
        |c, t| count(t, THREADS_MAX).map(|n| c.threads = n), |c| c.threads.to_string()),
    value("buffer_size", "Bytes of memory on each side.",
        |c, t| bytes(t).map(|n| c.buffer_bytes = n), |c| c.buffer_bytes.to_string()),
    value("duration", "Seconds during which new batches are started.",
        |c, t| read_seconds(t).map(|n| c.duration = n), |c| c.duration.as_secs().to_string()),
    value("report_unit", "Unit of throughput, per second: GB, GiB, Gb, MB, MiB, Mb, KB, KiB or Kb.",
        |c, t| one_of(t, &UNITS.map(|unit| unit.name)).map(|at| c.unit = UNITS[at]),
        |c| c.unit.name.to_owned()),
    value("report_precision", "Decimal places of the throughput.",
        |c, t| read_number(t).map(|n: usize| c.precision = n.min(PRECISION_MAX)),
        |c| c.precision.to_string()),
    value("backend", "Engine: classic. The engine tent is not supported.",
        |c, t| one_of(t, &["classic"]).and_then(|_| text(t, &mut c.backend)), |c| c.backend.clone()),
    switch("json", "Also prints all results as one JSON object to standard output.",
        |c, t| read_bool(t).map(|on| c.is_json = on), |c| c.is_json.to_string()),
    value("report", "Also writes a self-contained HTML page with plots to this file.",
        |c, t| text(t, &mut c.report), |c| c.report.clone()),
];

#[allow(clippy::unnecessary_wraps, reason = "the setter type of the option table")]
fn text(text: &str, to: &mut String) -> Result<()> {
    text.clone_into(to);
    Ok(())
}

fn bytes(text: &str) -> Result<u64> {
    match read_size(text)?.bytes() {
        0 => Err(Error::invalid("the size must be at least one byte")),
        bytes => Ok(bytes),
    }
}

fn count(text: &str, most: usize) -> Result<usize> {
    let number = read_number(text)?;
    if (1..=most).contains(&number) {
        return Ok(number);
    }
    Err(Error::invalid("out of range").with("text", text).with("most", most))
}

/// Returns the index of the word in the list.
fn one_of(text: &str, words: &[&'static str]) -> Result<usize> {
    words.iter().position(|word| *word == text).ok_or_else(|| {
        Error::invalid(format!("use one of {}", words.join(", "))).with("text", text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_used_for_the_protocol_rdma_only() {
        let config = BenchConfig { device_name: "mlx5_0".to_owned(), ..BenchConfig::default() };
        assert_eq!(config.rdma_devices(), None);
        let rdma = BenchConfig { protocol: "rdma".to_owned(), ..config };
        assert_eq!(rdma.rdma_devices(), Some("mlx5_0"));
        assert_eq!(BenchConfig { is_auto_discovering: true, ..rdma }.rdma_devices(), Some(""));
    }
}
