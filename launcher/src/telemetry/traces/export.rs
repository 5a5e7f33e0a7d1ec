//! Sends spans to a collector by OTLP over gRPC, from a thread of its own: a second's spans in one call.
//! While the collector does not answer, spans are dropped, and the log says so once.

use std::{
    sync::mpsc as rendezvous,
    thread,
    time::{Duration, Instant},
};

use tokio::sync::mpsc;
use tonic::{
    Request,
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;
use tracing::{info, warn};

use super::messages::{
    ExportRequest, ExportResponse, KeyValue, Resource, ResourceSpans, Scope, ScopeSpans, Span,
};
use crate::{clock, launch::inputs::Env};

/// Spans that wait at most: beyond them new ones are dropped.
const WAITING: usize = 8192;
/// Spans in one call at most.
const TOGETHER: usize = 1024;
/// How long spans are gathered.
const GATHERED: Duration = Duration::from_secs(1);
/// How long a call may take, and the last ones at the process's end.
const PATIENCE: Duration = Duration::from_secs(3);

/// Where spans wait to be sent.
pub struct Queue(mpsc::Sender<Parcel>);

impl Queue {
    /// Adds a span that has ended, if there is room.
    pub fn add(&self, span: Span) {
        let _ = self.0.try_send(Parcel::Send(span));
    }
}

enum Parcel {
    Send(Span),
    /// What has been added is sent, and then this is told.
    Finish(rendezvous::Sender<()>),
}

/// The thread that sends. Dropped, it sends what is left, for three seconds at most.
pub struct Exporter(mpsc::Sender<Parcel>);

impl Drop for Exporter {
    fn drop(&mut self) {
        let (told, finished) = rendezvous::channel();
        let asked = self.0.try_send(Parcel::Finish(told)).is_ok();
        if !asked || finished.recv_timeout(PATIENCE).is_err() {
            warn!("the newest traces are dropped: they were not sent within {} s", PATIENCE.as_secs());
        }
    }
}

/// The collector that the environment names, by the variables of OpenTelemetry's specification.
pub fn endpoint(env: Env) -> Result<Option<Endpoint>, String> {
    let names = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
    let Some((name, url)) = names.iter().find_map(|name| Some((name, env(name)?))) else { return Ok(None) };
    let protocols = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
    if let Some(other) = protocols.iter().find_map(|name| env(name)).filter(|protocol| protocol != "grpc") {
        return Err(format!(
            "no traces are sent: only OTLP over gRPC is supported, but the environment asks for {other}"
        ));
    }
    if !url.starts_with("http://") {
        return Err(format!(
            "no traces are sent: {name} is {url}, but only http://HOST:PORT is supported; use a collector \
             on this machine (http://localhost:4317) that forwards them"
        ));
    }
    let endpoint = Endpoint::from_shared(url.clone())
        .map_err(|error| format!("no traces are sent: {name} is {url}: {error}"))?;
    Ok(Some(endpoint.connect_timeout(PATIENCE).timeout(PATIENCE)))
}

impl Exporter {
    /// Starts the thread.
    pub fn start(endpoint: Endpoint, env: Env) -> Result<(Self, Queue), String> {
        let (sender, queue) = mpsc::channel(WAITING);
        let resource = Resource {
            attributes: vec![
                KeyValue::text("service.name", env("OTEL_SERVICE_NAME").unwrap_or("coxswain".into())),
                KeyValue::text("service.version", env!("CARGO_PKG_VERSION")),
                KeyValue::number("process.pid", u64::from(std::process::id())),
            ],
        };
        let run = move || {
            // Without a runtime nothing is sent; the log has said worse by then.
            if let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() {
                runtime.block_on(send_all(endpoint, resource, queue));
            }
        };
        thread::Builder::new()
            .name("traces".into())
            .spawn(run)
            .map_err(|error| format!("no traces are sent: cannot start their thread: {error}"))?;
        Ok((Self(sender.clone()), Queue(sender)))
    }
}

async fn send_all(endpoint: Endpoint, resource: Resource, mut queue: mpsc::Receiver<Parcel>) {
    let collector = endpoint.uri().to_string();
    let mut client = Grpc::new(endpoint.connect_lazy());
    let mut is_refused = false;
    while let Some(parcel) = queue.recv().await {
        let (spans, finished) = gather(parcel, &mut queue).await;
        if !spans.is_empty() {
            let sent = send(&mut client, message(resource.clone(), spans)).await;
            match (&sent, is_refused) {
                (Err(why), false) => {
                    warn!("traces are dropped while {collector} does not accept them: {why}")
                }
                (Ok(()), true) => info!("traces are sent to {collector} again"),
                _ => {}
            }
            is_refused = sent.is_err();
        }
        if let Some(finished) = finished {
            // Who waited may have gone.
            let _ = finished.send(());
            return;
        }
    }
}

/// The spans of the next second, and who waits for the last of them.
async fn gather(
    first: Parcel,
    queue: &mut mpsc::Receiver<Parcel>,
) -> (Vec<Span>, Option<rendezvous::Sender<()>>) {
    let until: Instant = clock::now() + GATHERED;
    let (mut spans, mut parcel) = (Vec::new(), Some(first));
    while let Some(next) = parcel.take() {
        match next {
            Parcel::Send(span) => spans.push(span),
            Parcel::Finish(told) => return (spans, Some(told)),
        }
        if spans.len() < TOGETHER {
            parcel = tokio::time::timeout_at(until.into(), queue.recv()).await.ok().flatten();
        }
    }
    (spans, None)
}

fn message(resource: Resource, spans: Vec<Span>) -> ExportRequest {
    let scope = Scope { name: "coxswain".into(), version: env!("CARGO_PKG_VERSION").into() };
    let scope_spans = vec![ScopeSpans { scope: Some(scope), spans }];
    ExportRequest { resource_spans: vec![ResourceSpans { resource: Some(resource), scope_spans }] }
}

async fn send(client: &mut Grpc<Channel>, message: ExportRequest) -> Result<(), String> {
    let path = PathAndQuery::from_static("/opentelemetry.proto.collector.trace.v1.TraceService/Export");
    client.ready().await.map_err(|error| error.to_string())?;
    let codec = ProstCodec::<ExportRequest, ExportResponse>::default();
    client.unary(Request::new(message), path, codec).await.map(drop).map_err(|status| status.message().into())
}

#[cfg(test)]
mod tests {
    use super::endpoint;

    #[test]
    fn collectors_that_cannot_be_used_are_named() {
        let asked = |given: &'static [(&str, &str)]| {
            endpoint(&|name| given.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
        };
        assert!(asked(&[]).unwrap().is_none());
        let both = asked(&[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://other:4317"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://localhost:4317"),
        ]);
        assert_eq!(both.unwrap().unwrap().uri().host(), Some("localhost"));
        for (given, part) in [
            (&[("OTEL_EXPORTER_OTLP_ENDPOINT", "https://traces.example")] as &[_], "http://localhost:4317"),
            (&[("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4317")], "OTEL_EXPORTER_OTLP_ENDPOINT"),
            (
                &[
                    ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318"),
                    ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
                ],
                "http/protobuf",
            ),
        ] {
            assert!(asked(given).is_err_and(|error| error.contains(part)), "{part}");
        }
    }
}
