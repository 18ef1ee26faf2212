//! Health over gRPC: that of tonic, while this master leads.

use std::{pin::Pin, sync::Arc};

use mooncake_proto::v1::master_server::MasterServer;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status};
use tonic_health::{
    pb::{
        HealthCheckRequest, HealthCheckResponse,
        health_check_response::ServingStatus,
        health_server::{Health, HealthServer},
    },
    server::{HealthReporter, HealthService},
};

use super::GrpcService;
use crate::service::Service;

/// Reports that the master serves, and from the end of its lease on that it does not.
#[derive(Debug)]
pub(super) struct HealthWhileLeading {
    inner: HealthService,
    service: Arc<Service>,
}

impl HealthWhileLeading {
    /// Returns the server of the health of a service.
    pub(super) async fn server(service: Arc<Service>) -> HealthServer<Self> {
        let reporter = HealthReporter::new();
        reporter.set_serving::<MasterServer<GrpcService>>().await;
        HealthServer::new(Self { inner: HealthService::from_health_reporter(reporter), service })
    }
}

/// Returns a status, or that the service does not serve if another master may lead by now.
fn at_this_moment(service: &Service, status: HealthCheckResponse) -> HealthCheckResponse {
    if service.shared().may_answer() {
        return status;
    }
    HealthCheckResponse { status: ServingStatus::NotServing.into() }
}

#[tonic::async_trait]
impl Health for HealthWhileLeading {
    type WatchStream =
        Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send + 'static>>;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let answer = self.inner.check(request).await?;
        Ok(answer.map(|status| at_this_moment(&self.service, status)))
    }

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let service = Arc::clone(&self.service);
        let watched = self.inner.watch(request).await?;
        Ok(watched.map(|statuses| {
            let statuses =
                statuses.map(move |status| status.map(|status| at_this_moment(&service, status)));
            Box::pin(statuses) as Self::WatchStream
        }))
    }
}
