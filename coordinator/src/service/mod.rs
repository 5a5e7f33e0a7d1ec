//! The two gRPC services, and the run's metrics on the same port: decode, ask, encode. Nothing is decided
//! here.

mod auth;
mod cache;
mod decode;
mod encode;
mod fields;
mod metrics;
mod node;
mod people;
pub mod readers;
mod records;
mod shared;
mod workers;

use std::sync::Arc;

use axum::{
    extract::Request,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use coxswain_identity::Tokens;
use coxswain_proto::{
    limits::{HEARTBEAT_INTERVAL, MAX_CONTROL_REQUEST, MAX_MESSAGE_BYTES, MAX_STREAMS},
    v1::{self, control_server::ControlServer, coordinator_server::CoordinatorServer},
};
use tonic::{
    Status,
    service::Routes,
    transport::{Server, server::Router},
};

use crate::{driver::Handle, options::ConnectionBounds};
pub use shared::RunFacts;
use shared::Service;

/// Why reflection could not be set up.
pub type ReflectionError = tonic_reflection::server::Error;

/// A server with both services, health, reflection, and `GET /metrics` over HTTP/1 and 2.
pub async fn router(
    handle: Handle,
    facts: RunFacts,
    tokens: Option<&Tokens>,
    bounds: ConnectionBounds,
) -> Result<Router, ReflectionError> {
    let service = Service { handle, facts: Arc::new(facts) };
    let guard = auth::Guard::new(tokens.cloned(), readers::Readers::with(bounds.read));
    let workers = CoordinatorServer::new(service.clone())
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let people = ControlServer::new(service.clone())
        .max_decoding_message_size(MAX_CONTROL_REQUEST)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let (reporter, health) = tonic_health::server::health_reporter();
    let health = health.max_decoding_message_size(MAX_CONTROL_REQUEST);
    reporter.set_serving::<CoordinatorServer<Service>>().await;
    reporter.set_serving::<ControlServer<Service>>().await;
    let descriptors = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(v1::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let routes = Routes::new(workers)
        .add_service(people)
        .add_service(health)
        .add_service(descriptors().build_v1()?.max_decoding_message_size(MAX_CONTROL_REQUEST))
        .add_service(descriptors().build_v1alpha()?.max_decoding_message_size(MAX_CONTROL_REQUEST))
        .into_axum_router()
        .route(metrics::METRICS, axum::routing::get(metrics::scrape).with_state(service))
        .fallback(unknown)
        .layer(axum::middleware::from_fn_with_state(guard, auth::guarded));
    Ok(Server::builder()
        // Prometheus scrapes with it.
        .accept_http1(true)
        .tcp_nodelay(true)
        .max_concurrent_streams(Some(MAX_STREAMS))
        .http2_keepalive_interval(Some(HEARTBEAT_INTERVAL * 5))
        .http2_keepalive_timeout(Some(HEARTBEAT_INTERVAL * 10))
        .add_routes(routes.into()))
}

/// A path that nothing answers: gRPC's own status for its clients, 404 for others, whose probes would take
/// that status for health.
async fn unknown(request: Request) -> Response {
    let content = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    match content.is_some_and(|content| content.starts_with("application/grpc")) {
        true => Status::unimplemented("this coordinator has no such method").into_http(),
        false => (StatusCode::NOT_FOUND, "not found: this port serves gRPC and /metrics\n").into_response(),
    }
}
