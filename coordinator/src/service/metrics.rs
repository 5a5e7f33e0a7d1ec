//! `GET /metrics`: the run's status for Prometheus, on the port of the gRPC services.
//!
//! Every scrape looks at the status that `cox status` shows and renders it as OpenMetrics text;
//! nothing is counted here, so a restarted coordinator goes on where its journal is. Names begin with
//! `coxswain_`, units are base units and stand at their end. A value that is not known yet is left out.

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use axum::{
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use coxswain_proto::{
    ids::Bytes,
    report::{Metric, stage_times},
};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, text},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::{Registry, Unit},
};

use super::shared::{RunFacts, Service};
use crate::core::status::{CacheStatus, HardwareFaults, RankStatus, Status, WorkerStatus};

/// Where they are.
pub const METRICS: &str = "/metrics";
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Answers a scrape: in OpenMetrics, or in the older text format to those who ask for plain text alone.
pub async fn scrape(State(service): State<Service>, asked: HeaderMap) -> Response {
    let status = match service.handle.status().await {
        Ok(status) => Arc::unwrap_or_clone(status),
        Err(denied) => return unavailable(&denied),
    };
    match exposition(status, service.facts) {
        Ok(text) if wants_plain(&asked) => ([(header::CONTENT_TYPE, PLAIN)], plain(&text)).into_response(),
        Ok(text) => ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(error) => unavailable(&error),
    }
}

/// A scraper that takes OpenMetrics, or does not say what it takes, gets that.
fn wants_plain(asked: &HeaderMap) -> bool {
    let asked = asked.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let types: Vec<_> =
        asked.flat_map(|list| list.split(',')).filter_map(|one| one.split(';').next()).collect();
    let takes = |wanted: &str| types.iter().any(|one| one.trim().eq_ignore_ascii_case(wanted));
    takes("text/plain") && !takes("application/openmetrics-text")
}

/// Metrics in Prometheus' text format 0.0.4, which describes a counter by the name of its samples and has
/// neither units nor an end.
fn plain(open_metrics: &str) -> String {
    let lines: Vec<_> = open_metrics.lines().collect();
    let is_counter = |name: &str| lines.contains(&&*format!("# TYPE {name} counter"));
    let mut out = String::new();
    for line in lines.iter().filter(|line| !line.starts_with("# UNIT") && **line != "# EOF") {
        let mut words = line.splitn(4, ' ');
        match [words.next(), words.next(), words.next(), words.next()] {
            [Some("#"), Some(of), Some(name), Some(rest)] if is_counter(name) => {
                out.push_str(&format!("# {of} {name}_total {rest}"));
            }
            _ => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

fn unavailable(why: &dyn fmt::Display) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response()
}

/// The status as OpenMetrics text.
fn exposition(status: Status, facts: Arc<RunFacts>) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("coxswain");
    registry.register_collector(Box::new(Snapshot { status, facts }));
    let mut out = String::new();
    text::encode(&mut out, &registry)?;
    Ok(out)
}

/// A run at one moment.
#[derive(Debug)]
struct Snapshot {
    status: Status,
    facts: Arc<RunFacts>,
}

impl Collector for Snapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut sheet = Sheet(encoder);
        run(&mut sheet, &self.status, &self.facts)?;
        newest_step(&mut sheet, &self.status)?;
        ranks(&mut sheet, &self.status.ranks)?;
        hardware(&mut sheet, &self.status.hardware)?;
        match &self.status.cache {
            Some(cache) => kept_features(&mut sheet, cache),
            None => Ok(()),
        }
    }
}

fn run(sheet: &mut Sheet<'_>, status: &Status, facts: &RunFacts) -> fmt::Result {
    let phase = status.phase.to_string();
    let labels = [
        ("run_id", facts.run_id.as_str()),
        ("run_name", &facts.run_name),
        ("version", &facts.version),
        ("phase", &phase),
    ];
    sheet.family(
        "run",
        "The run that this coordinator serves, and the phase it is in",
        None,
        [(labels, 1.0)],
    )?;
    sheet.number(
        "generation",
        "Number of the generation; grows with each change of workers",
        status.generation.0,
    )?;
    sheet.number("world_size", "Workers wanted", status.workers.wanted.into())?;
    sheet.number("workers", "Workers present", status.workers.present.into())?;
    sheet.number("spares", "Workers present without a rank", status.workers.spare.into())?;
    sheet.number("steps_committed", "Committed steps", status.committed.0)?;
    sheet.number("steps_skipped", "Committed steps that were left out", status.skipped)?;
    if let Some(plan) = status.plan {
        sheet.number("steps_planned", "Steps of the whole run", plan.total_steps())?;
    }
    sheet.number("epoch", "The epoch of the next step", status.epoch())?;
    if let Some(eta) = status.eta {
        sheet.seconds("eta", "Time left at the present speed", eta)?;
    }
    sheet.counter("restarts", "Faults survived", status.spent.restarts.into())?;
    sheet.counter("rescales", "Planned changes of the world size", status.spent.rescales.into())?;
    if let Some(newest) = status.checkpoints.last() {
        sheet.number("checkpoint_step", "Step at which the newest checkpoint resumes", newest.step.0)?;
        sheet.bytes("checkpoint_size", "Size of the newest checkpoint", newest.bytes)?;
    }
    Ok(())
}

/// What the last committed step said; nothing before the first one.
fn newest_step(sheet: &mut Sheet<'_>, status: &Status) -> fmt::Result {
    let Some(step) = &status.last else { return Ok(()) };
    sheet.gauge("loss", "Mean loss over valid elements", step.totals.loss())?;
    sheet.gauge("grad_norm", "Norm of the global gradient, before clipping", step.totals.grad_norm)?;
    if let Some(rate) = step.learning_rate() {
        sheet.gauge("learning_rate", "Highest learning rate of all parameter groups", rate)?;
    }
    sheet.gauge("samples_per_second", "Samples a second over all ranks", step.samples_per_second())?;
    sheet.gauge("tokens_per_second", "Tokens a second over all ranks", step.tokens_per_second())?;
    let times = &step.times;
    sheet.seconds("step_time", "Time of the last step, mean over ranks", times.total)?;
    let parts =
        [("data", times.data), ("optimizer", times.optimizer), ("communication", times.communication)];
    let parts =
        parts.into_iter().map(|(part, time)| (part, time.as_secs_f64())).chain(stage_times(&step.metrics));
    let rows = parts.map(|(part, seconds)| ([("part", part)], seconds));
    sheet.family(
        "step_part_time",
        "Parts of the last step's time, mean over ranks",
        Some(Unit::Seconds),
        rows,
    )?;
    let of_step = step.metrics.iter().filter(|metric| !metric.is_held_out());
    figures(sheet, of_step.chain(&status.held_out))
}

/// Figures that only the task knows, of the step or of the newest look at held-out samples: a family for each
/// kind and unit, with what it is of as a label.
fn figures<'m>(sheet: &mut Sheet<'_>, metrics: impl Iterator<Item = &'m Metric>) -> fmt::Result {
    let mut families = BTreeMap::<String, Vec<&Metric>>::new();
    for metric in metrics.filter(|metric| metric.as_stage_time().is_none()) {
        let unit = match &*metric.unit {
            "1" => "",
            "s" => "_seconds",
            other => &format!("_{other}"),
        };
        families.entry(format!("metric_{}{unit}", metric.kind())).or_default().push(metric);
    }
    for (name, members) in families {
        let rows = members.into_iter().map(|metric| ([("of", metric.suffix())], metric.value));
        sheet.family(
            &name,
            "Metrics of the task, from the last step or from the newest evaluation on held-out samples",
            None,
            rows,
        )?;
    }
    Ok(())
}

/// A process that has not made itself known has no device, and nothing to show but its silence.
fn ranks(sheet: &mut Sheet<'_>, ranks: &[RankStatus]) -> fmt::Result {
    let names: Vec<_> = ranks.iter().map(|rank| rank.slot.0.to_string()).collect();
    let of_worker = |value: fn(&WorkerStatus) -> u64| {
        move |rank: &RankStatus| rank.worker().map(|worker| value(worker) as f64)
    };
    let mut each = |name, help, unit, value: &dyn Fn(&RankStatus) -> Option<f64>| {
        let rows = ranks.iter().zip(&names).filter_map(|(rank, name)| {
            let device = rank.worker().map_or("", |worker| &worker.device);
            Some(([("rank", name.as_str()), ("host", &rank.host), ("device", device)], value(rank)?))
        });
        sheet.family(name, help, unit, rows)
    };
    let peak = of_worker(|worker| worker.memory_peak.0);
    each("rank_memory_peak", "Largest memory peak of a rank", Some(Unit::Bytes), &peak)?;
    let step = of_worker(|worker| worker.step.0);
    each("rank_step", "Step of a rank when it was last heard of", None, &step)?;
    each(
        "rank_slowness",
        "Own time of a slow rank divided by the median of the others; absent for ranks that keep up",
        None,
        &|rank| rank.worker()?.slow.map(|slow| slow.factor),
    )?;
    each("rank_silence", "Time since a rank was last heard of", Some(Unit::Seconds), &|rank| {
        Some(rank.silent.as_secs_f64())
    })
}

/// Slots whose hardware has shown faults.
fn hardware(sheet: &mut Sheet<'_>, faulty: &[HardwareFaults]) -> fmt::Result {
    let cordoned = faulty.iter().filter(|of| of.health.cordoned).count();
    sheet.number("cordoned_slots", "Slots that are cordoned after hardware faults", cordoned as u64)?;
    let names: Vec<_> = faulty.iter().map(|of| of.slot.0.to_string()).collect();
    let rows = faulty.iter().zip(&names).map(|(of, name)| {
        ([("rank", name.as_str()), ("host", of.host.as_str())], f64::from(of.health.faults))
    });
    sheet.family("hardware_faults", "Hardware faults of a slot; absent for slots without any", None, rows)
}

fn kept_features(sheet: &mut Sheet<'_>, cache: &CacheStatus) -> fmt::Result {
    sheet.number(
        "cache_serving",
        "Version of the cached features that the next step uses; 0: live",
        cache.serving,
    )?;
    if let Some((newest, _)) = cache.generations.last() {
        sheet.number(
            "cache_stored",
            "Samples stored by the newest cache generation",
            newest.stored_so_far(),
        )?;
        sheet.number("cache_samples", "Samples that the newest cache generation can hold", newest.total)?;
        sheet.bytes("cache_size", "Size of the newest cache generation", newest.bytes)?;
    }
    let sum = |count: fn(&crate::core::cache::GenerationEntry) -> u64| {
        cache.generations.iter().map(|(generation, _)| count(generation)).sum::<u64>()
    };
    sheet.number(
        "cache_hits",
        "Cache hits, summed over the newest generations of the cache",
        sum(|entry| entry.used.hits),
    )?;
    sheet.number(
        "cache_misses",
        "Cache misses, summed over the newest generations of the cache",
        sum(|entry| entry.used.misses),
    )?;
    sheet.number(
        "cache_damaged",
        "Damaged records, summed over the newest generations of the cache",
        sum(|entry| entry.damaged),
    )?;
    if let Some((newest, _)) = cache.drifts.last() {
        sheet.gauge("cache_drift", "Relative L2 drift at the last measurement", newest.drift.relative_l2)?;
    }
    Ok(())
}

/// Writes metrics one by one.
struct Sheet<'a>(DescriptorEncoder<'a>);

impl Sheet<'_> {
    fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        self.measured(name, help, None, value)
    }

    fn number(&mut self, name: &str, help: &str, number: u64) -> fmt::Result {
        self.measured(name, help, None, number as f64)
    }

    fn bytes(&mut self, name: &str, help: &str, Bytes(bytes): Bytes) -> fmt::Result {
        self.measured(name, help, Some(Unit::Bytes), bytes as f64)
    }

    fn seconds(&mut self, name: &str, help: &str, time: Duration) -> fmt::Result {
        self.measured(name, help, Some(Unit::Seconds), time.as_secs_f64())
    }

    fn measured(&mut self, name: &str, help: &str, unit: Option<Unit>, value: f64) -> fmt::Result {
        let metric = self.0.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
        ConstGauge::new(value).encode(metric)
    }

    fn counter(&mut self, name: &str, help: &str, count: u64) -> fmt::Result {
        let metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        ConstCounter::new(count).encode(metric)
    }

    /// One gauge for each row of labels.
    fn family<'l, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        rows: impl IntoIterator<Item = ([(&'l str, &'l str); N], f64)>,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
        for (labels, value) in rows {
            ConstGauge::new(value).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
