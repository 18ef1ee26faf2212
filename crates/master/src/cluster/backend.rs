//! The lease service that the options name.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use mooncake_base::{Endpoint, Moment, Result};
use mooncake_election::{
    ClusterId, LeaseService,
    etcd::EtcdLease,
    kubernetes::{ApiServer, KubernetesLease, LeaderLabel},
    redis::RedisLease,
};
use mooncake_kv_client::redis::RedisAddress;

use crate::config::{LeaseBackend, MasterConfig};

/// Time in which a leader must accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// How a standby finds the addresses of a leader.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dialing {
    /// Returns the addresses of a host, at least one.
    pub(super) resolve: fn(&Endpoint, Moment) -> Result<Vec<SocketAddr>>,
    /// Time in which a leader must be found and accept a connection.
    pub(super) timeout: Duration,
}

impl Default for Dialing {
    fn default() -> Self {
        Self { resolve: mooncake_os::dial::resolve, timeout: CONNECT_TIMEOUT }
    }
}

/// The services outside of the cluster that a member uses.
#[derive(Debug)]
pub(super) struct Backend {
    pub(super) lease_service: Arc<dyn LeaseService>,
    /// The label of the pod that says whether this master leads. `None` outside of Kubernetes, and if
    /// the options do not name the pod.
    pub(super) label: Option<LeaderLabel>,
    pub(super) dialing: Dialing,
}

impl Backend {
    /// Creates the clients of the services.
    ///
    /// # Errors
    /// An option is missing or invalid, or the service account of the pod cannot be read.
    pub(super) fn of(config: &MasterConfig) -> Result<Self> {
        let (lease_service, label) = (lease_service(config)?, leader_label(config)?);
        Ok(Self { lease_service, label, dialing: Dialing::default() })
    }
}

/// Creates the client of the lease service.
///
/// # Errors
/// The options name none, or it is invalid.
fn lease_service(config: &MasterConfig) -> Result<Arc<dyn LeaseService>> {
    let settings = &config.cluster;
    let cluster = ClusterId::new(&config.cluster_id)?;
    let place = without_scheme(settings.backend, settings.place()?);
    Ok(match settings.backend {
        LeaseBackend::Etcd => {
            let members = place.split([';', ',']).map(|member| member.trim().parse());
            let members = members.collect::<Result<Vec<Endpoint>>>()?;
            Arc::new(EtcdLease::new(&members, &cluster, settings.lease_ttl)?)
        }
        LeaseBackend::Redis => {
            let address = RedisAddress::parse(place, &settings.redis)?;
            Arc::new(RedisLease::new(address, &cluster, settings.lease_ttl))
        }
        LeaseBackend::Kubernetes => {
            let namespace = match &settings.pod_namespace[..] {
                "" => "default",
                name => name,
            };
            let (namespace, lease) = place.split_once('/').unwrap_or((namespace, place));
            Arc::new(KubernetesLease::in_pod(namespace, lease, settings.lease_ttl)?)
        }
    })
}

/// Begins to keep the label of the pod.
///
/// # Errors
/// The name is invalid, or the service account of the pod cannot be read.
fn leader_label(config: &MasterConfig) -> Result<Option<LeaderLabel>> {
    let settings = &config.cluster;
    if settings.backend != LeaseBackend::Kubernetes || settings.pod_name.is_empty() {
        return Ok(None);
    }
    let namespace = Some(&settings.pod_namespace[..]).filter(|name| !name.is_empty());
    LeaderLabel::start(ApiServer::in_pod(namespace)?, &settings.pod_name).map(Some)
}

/// Clients name the service with a scheme; here it may be left out.
fn without_scheme(backend: LeaseBackend, place: &str) -> &str {
    let scheme = match backend {
        LeaseBackend::Etcd => "etcd://",
        LeaseBackend::Redis => "redis://",
        LeaseBackend::Kubernetes => "k8s://",
    };
    place.strip_prefix(scheme).unwrap_or(place)
}
