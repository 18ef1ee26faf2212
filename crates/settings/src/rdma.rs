//! Settings of RDMA devices from environment variables.

use std::{collections::BTreeMap, time::Duration};

use mooncake_base::{
    Error, Result,
    env::{self, EnvVar},
    parse::{read_bool, read_number, read_seconds},
};
use mooncake_transfer_engine::{
    EngineConfig, Topology,
    rdma::{Mtu, PeerAffinity, RdmaSettings},
};

use crate::{
    engine::{custom_topology, topology},
    variable::{is_on_by_default, value},
};

/// The name that stands for all devices.
const AUTO_DISCOVERY: &str = "auto-discovery";

/// Makes an engine use RDMA devices, by their names as for [`rdma_settings`]; None uses none.
///
/// # Errors
/// A variable has an invalid value.
pub fn use_rdma(config: &mut EngineConfig, devices: Option<&str>) -> Result<()> {
    config.rdma = devices.map(rdma_settings).transpose()?;
    config.rdma_bind_address = config.rdma.as_ref().and_then(|_| bind_address());
    Ok(())
}

/// Makes the engine of a store use RDMA devices, as [`use_rdma`] and the variables of stores say.
///
/// # Errors
/// A variable has an invalid value, or requires names of devices and there are none.
pub fn use_rdma_for_store(config: &mut EngineConfig, devices: Option<&str>) -> Result<()> {
    let Some(devices) = devices else { return Ok(()) };
    let is_automatic = value(&env::MC_MS_AUTO_DISC, read_bool)?;
    let is_unnamed = names(devices).is_empty();
    if is_automatic == Some(false) && is_unnamed {
        return Err(Error::invalid("the names of RDMA devices are required")
            .with("variable", env::MC_MS_AUTO_DISC.name)
            .with("value", 0));
    }
    let chooses = is_unnamed || is_automatic == Some(true) || devices.trim() == AUTO_DISCOVERY;
    let mut settings = rdma_settings(if chooses { "" } else { devices })?;
    if chooses {
        restrict(&mut settings.allowed, listed(&env::MC_MS_FILTERS))?;
    }
    config.rdma = Some(settings);
    config.rdma_bind_address = bind_address();
    Ok(())
}

/// Returns the address under which peers connect devices, if it is not the published one.
fn bind_address() -> Option<String> {
    env::MC_RDMA_BIND_ADDRESS.read().filter(|address| !address.is_empty())
}

/// Returns the settings of RDMA devices; `devices` has names separated by commas, or is empty or
/// `auto-discovery` for all that are active. The other settings come from the environment.
///
/// # Errors
/// A variable has an invalid value.
pub fn rdma_settings(devices: &str) -> Result<RdmaSettings> {
    let mut wanted = names(devices);
    wanted.retain(|name| name != AUTO_DISCOVERY);
    let mut settings = RdmaSettings {
        devices: wanted,
        allowed: listed(&env::MC_TE_FILTERS),
        excluded: listed(&env::MC_TE_FILTERS_EXCLUDE),
        is_required: env::MC_FORCE_HCA.read().is_some(),
        affinity: affinity()?,
        uses_device_memory: !env::MC_DISABLE_GPU_DIRECT_RDMA.is_on(),
        is_relaxed: is_on_by_default(&env::MC_IB_PCI_RELAXED_ORDERING),
        ..RdmaSettings::default()
    };
    let topology = topology("")?;
    if custom_topology().is_some() {
        // The file replaces what the kernel reports: devices that it does not list are not used.
        restrict(&mut settings.allowed, devices_of(&topology))?;
    }
    settings.near = near(topology.locations());
    settings.near_gpus = near(topology.gpus());
    set(&mut settings.port, &env::MC_IB_PORT)?;
    settings.gid_index = match value(&env::MC_GID_INDEX, read_number::<i32>)? {
        None | Some(-1) => None,
        Some(index) => Some(u8::try_from(index).map_err(|_| {
            Error::invalid("an index of the address table is 0 to 255, or -1 to choose")
                .with("variable", env::MC_GID_INDEX.name)
                .with("value", index)
        })?),
    };
    if let Some(mtu) = value(&env::MC_MTU, read_mtu)? {
        settings.mtu = mtu;
    }
    settings.traffic_class = read_class(&env::MC_IB_TC)?.unwrap_or(settings.traffic_class);
    settings.service_level = read_class(&env::MC_IB_SL)?.unwrap_or(settings.service_level);
    set(&mut settings.partition_index, &env::MC_PKEY_INDEX)?;
    set(&mut settings.queue_pairs, &env::MC_NUM_QP_PER_EP)?;
    set(&mut settings.queue_depth, &env::MC_MAX_WR)?;
    set(&mut settings.inline_bytes, &env::MC_MAX_INLINE)?;
    set(&mut settings.device_depth, &env::MC_MAX_CQE_PER_CTX)?;
    set(&mut settings.connections_max, &env::MC_MAX_EP_PER_CTX)?;
    set(&mut settings.slice_bytes, &env::MC_SLICE_SIZE)?;
    settings.slice_tail_bytes = match value(&env::MC_FRAGMENT_RATIO, read_number::<u32>)? {
        Some(ratio) => settings.slice_bytes / ratio.max(1),
        None => settings.slice_bytes / 4,
    };
    set(&mut settings.tries, &env::MC_RETRY_CNT)?;
    set(&mut settings.region_bytes_max, &env::MC_MAX_MR_SIZE)?;
    if let Some(timeout) = value(&env::MC_SLICE_TIMEOUT, read_seconds)? {
        settings.stall_timeout = timeout;
    }
    if let Some(pause) = value(&env::MC_RDMA_RAIL_PAUSE_SECONDS, read_seconds)? {
        settings.pause_max = pause.max(Duration::from_millis(50));
    }
    settings.check()?;
    Ok(settings)
}

/// Returns the devices of a topology, each once.
fn devices_of(topology: &Topology) -> Vec<String> {
    let rows = topology.locations().chain(topology.gpus());
    let mut found: Vec<_> = rows.flat_map(|(_, near, far)| [near, far].concat()).collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// Returns the near devices of each row of a topology that has some.
fn near<'a>(
    rows: impl Iterator<Item = (&'a str, &'a [String], &'a [String])>,
) -> BTreeMap<String, Vec<String>> {
    let rows = rows.map(|(name, near, _)| (name.to_owned(), near.to_vec()));
    rows.filter(|(_, near)| !near.is_empty()).collect()
}

/// Restricts a list of allowed devices to those of another list; an empty list allows all.
///
/// # Errors
/// The lists have no device in common.
fn restrict(allowed: &mut Vec<String>, others: Vec<String>) -> Result<()> {
    if allowed.is_empty() {
        *allowed = others;
    } else if !others.is_empty() {
        allowed.retain(|name| others.contains(name));
        if allowed.is_empty() {
            let text = "the lists of allowed RDMA devices have none in common";
            return Err(Error::invalid(text)
                .with("variables", "MC_TE_FILTERS, MC_MS_FILTERS, MC_CUSTOM_TOPO_JSON")
                .with("other", others.join(",")));
        }
    }
    Ok(())
}

/// Returns which devices of peers the own ones prefer.
fn affinity() -> Result<PeerAffinity> {
    match (env::MC_ENABLE_DEST_DEVICE_AFFINITY.is_on(), env::MC_ENABLE_HCA_PEER_AFFINITY.is_on()) {
        (false, false) => Ok(PeerAffinity::None),
        (true, false) => Ok(PeerAffinity::SameName),
        (false, true) => value(&env::MC_NIC_PEER_AFFINITY, read_affinity)?.ok_or_else(|| {
            Error::invalid("the preferred pairs of RDMA devices are missing")
                .with("variable", env::MC_NIC_PEER_AFFINITY.name)
        }),
        (true, true) => Err(Error::invalid("only one kind of device affinity may be on")
            .with("variables", "MC_ENABLE_DEST_DEVICE_AFFINITY, MC_ENABLE_HCA_PEER_AFFINITY")),
    }
}

/// Parses `LOCAL=PEER,PEER;LOCAL=PEER`.
fn read_affinity(text: &str) -> Result<PeerAffinity> {
    let mut preferred = BTreeMap::new();
    for row in text.split(';').map(str::trim).filter(|row| !row.is_empty()) {
        let pair = row.split_once('=').map(|(own, peers)| (own.trim().to_owned(), names(peers)));
        let Some((own, peers)) = pair.filter(|(own, peers)| !own.is_empty() && !peers.is_empty())
        else {
            let text =
                "the affinity of RDMA devices is a list like mlx5_0=mlx5_0,mlx5_1;mlx5_2=mlx5_3";
            return Err(Error::invalid(text).with("text", row));
        };
        preferred.insert(own, peers);
    }
    Ok(PeerAffinity::Names(preferred))
}

/// Splits names separated by commas.
fn names(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// Returns the names in a variable.
fn listed(var: &'static EnvVar) -> Vec<String> {
    var.read().map_or_else(Vec::new, |text| names(&text))
}

/// Sets a number from a variable, if it is set.
fn set<T: std::str::FromStr>(number: &mut T, var: &'static EnvVar) -> Result<()> {
    if let Some(given) = value(var, read_number)? {
        *number = given;
    }
    Ok(())
}

/// Returns a class of service; -1 is the default.
fn read_class(var: &'static EnvVar) -> Result<Option<u8>> {
    let given = value(var, read_number::<i32>)?.filter(|class| *class != -1);
    let class = given.map(u8::try_from).transpose();
    class.map_err(|_| {
        Error::invalid("a class of service is 0 to 255, or -1 for the default")
            .with("variable", var.name)
    })
}

fn read_mtu(text: &str) -> Result<Mtu> {
    let bytes = read_number(text)?;
    Mtu::from_bytes(bytes).ok_or_else(|| {
        Error::invalid("the MTU must be 256, 512, 1024, 2048 or 4096").with("text", text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_split_and_trimmed() {
        let names = |text| rdma_settings(text).unwrap().devices;
        assert_eq!(names("mlx5_0, mlx5_1,"), ["mlx5_0", "mlx5_1"]);
        assert_eq!(names(""), [""; 0]);
        assert_eq!(names("auto-discovery"), [""; 0]);
    }

    #[test]
    fn affinity_is_read_by_local_device() {
        let PeerAffinity::Names(read) = read_affinity("a=b, c;d=a;").unwrap() else { panic!() };
        let rows = [("a".to_owned(), names("b,c")), ("d".to_owned(), names("a"))];
        assert_eq!(read, BTreeMap::from(rows));
        for bad in ["a", "a=", "=b"] {
            assert!(read_affinity(bad).unwrap_err().to_string().contains(bad));
        }
    }

    #[test]
    fn lists_of_allowed_devices_are_intersected() {
        let both = |first, second| {
            let mut allowed = names(first);
            restrict(&mut allowed, names(second)).map(|()| allowed)
        };
        assert_eq!(both("", "a,b").unwrap(), ["a", "b"]);
        assert_eq!(both("a,b", "").unwrap(), ["a", "b"]);
        assert_eq!(both("a,b", "b,c").unwrap(), ["b"]);
        assert!(both("a", "b").unwrap_err().to_string().contains("MC_MS_FILTERS"));
    }

    #[test]
    fn topology_tells_devices_and_near_ones() {
        let text = br#"{"cpu:0": [["b"], ["a"]], "cpu:1": [[], ["a", "b"]]}"#;
        let topology = Topology::from_json(text).unwrap();
        assert_eq!(devices_of(&topology), ["a", "b"]);
        assert_eq!(near(topology.locations()), BTreeMap::from([("cpu:0".to_owned(), names("b"))]));
    }

    #[test]
    fn rejects_sizes_that_are_no_mtu() {
        assert_eq!(read_mtu("1024").unwrap(), Mtu::Bytes1024);
        assert!(read_mtu("1500").is_err());
        assert!(read_mtu("big").is_err());
    }
}
