//! A plan as text and as JSON.

use coxswain_proto::{
    human,
    plan::Plan,
    run_spec::{Offload, Recompute, Shard},
};
use coxswain_worker::memory::{
    Category,
    prediction::{
        Suggestion,
        fit::{FitVerdict, Split},
    },
};
use serde_json::{Value, json};

use super::table::{grid, remarked, table, width, words};
use coxswain_task::memory::{BESIDE_RESERVED, Use, communicator};

use crate::plan::{
    Basis, Choice, Outlook, Question, StepTime, capacity::Memory, uses::UseEstimate, vary::Variant,
};

/// The label of the longest sample, in what a run's model says of itself.
const SAMPLE: &str = "sample";

/// Everything about the run in each memory.
pub fn outlooks(question: &Question, outlooks: &[Outlook]) -> String {
    let mut parts = vec![subject(question)];
    for outlook in outlooks {
        parts.push(of_memory(question, outlook));
    }
    parts.push(words(&basis(outlooks), width()).join("\n"));
    parts.join("\n\n")
}

/// A run as it starts: what trains, on what, for how long; then what it will take of each kind of memory by
/// category, what fits there, and the split of a step.
pub fn at_start(question: &Question, outlooks: &[Outlook], data: &str, steps: &Plan) -> String {
    // The data set's own words are nearer than those about its longest sample.
    let model = question.subject.describe().into_iter().filter(|(label, _)| *label != SAMPLE);
    let (all, epoch) = (steps.total_steps(), steps.steps_per_epoch());
    let batch = human::grouped(steps.global_batch());
    let length = format!("{}, each {batch} samples; {} an epoch", human::grouped(all), human::grouped(epoch));
    let time = outlooks.first().and_then(|outlook| outlook.step);
    let time = time.map(|step| ("time", step.in_words(Some(all), Some(epoch))));
    let mut lines: Vec<_> = model.chain([("data", data.to_owned()), ("steps", length)]).chain(time).collect();
    lines.extend(outlooks.first().map(|outlook| ("device", device(question, &outlook.memory))));
    let mut parts =
        vec![lines.iter().map(|(label, text)| format!("{label:<10} {text}\n")).collect::<String>()];
    for outlook in outlooks {
        let half: Vec<_> = question
            .suggestions(&outlook.memory)
            .iter()
            .filter(|suggestion| suggestion.saves > 0)
            .filter(|suggestion| {
                ["=bfloat16", "=float16"].iter().any(|end| suggestion.setting.ends_with(end))
            })
            .map(|suggestion| format!("{} saves {}", suggestion.setting, signed(suggestion.saves)))
            .collect();
        parts.push(format!("{}\n{}", title(&outlook.memory), categories(question, outlook)));
        let half =
            if half.is_empty() { String::new() } else { format!("half precision: {}\n", half.join(", ")) };
        parts.push(format!("{}\n{half}{}", bounds(question, outlook), split(question, outlook)));
    }
    parts.push(words(&basis(outlooks), width()).join("\n"));
    parts.join("\n")
}

/// Where the ranks compute.
fn device(question: &Question, memory: &Memory) -> String {
    // Without the number that tells it from the others.
    let kind = memory.name.trim_start_matches(|c: char| c.is_ascii_digit() || c == ' ');
    format!("{} on {}", ranks(question.world), if memory.is_gpu { kind } else { "the CPU" })
}

/// How a step's samples are shared out, and what that will take.
fn split(question: &Question, outlook: &Outlook) -> String {
    let spec = question.subject.spec();
    let Split { micro_batch, accumulation, peak } = outlook.current;
    format!(
        "{} x micro-batch {micro_batch} x accumulation {accumulation} = {} samples a step, recompute {}, predicted peak {} in use",
        ranks(question.world),
        spec.train.global_batch,
        outlook.recompute,
        human::bytes(peak),
    )
}

/// One row for each memory.
pub fn overview(question: &Question, outlooks: &[Outlook]) -> String {
    let epoch = question.steps_per_epoch();
    let steps = epoch.unwrap_or(1) as f64;
    let rows: Vec<_> = outlooks
        .iter()
        .map(|outlook| {
            let split = |micro: Option<u64>| match micro {
                None => "-".to_owned(),
                Some(micro) => format!("{micro} x {}", question.samples().div_ceil(micro)),
            };
            let peak = outlook.best().map_or(outlook.current.peak, |best| best.peak);
            let row = [
                outlook.memory.name.clone(),
                human::bytes(outlook.memory.total),
                split(outlook.fit.safe),
                split(outlook.fit.recommended),
                split(outlook.fit.maximum),
                human::bytes(peak),
                percent(peak, outlook.memory.capacity()),
                outlook.step.map_or_else(|| "-".to_owned(), |step| human::seconds(steps * step.seconds)),
            ];
            let uses = question.uses(&outlook.memory).into_iter();
            let mode = chooses(question).then(|| outlook.recompute.to_string());
            let uses = uses.map(|used| micro(used.fit.recommended));
            row.into_iter().chain(mode).chain(uses).collect::<Vec<_>>()
        })
        .collect();
    let uses = outlooks.first().map(|outlook| question.uses(&outlook.memory)).unwrap_or_default();
    let named = uses.iter().map(|used| match used.using {
        Use::Evaluation => "evaluation",
        Use::Answers => "answers",
    });
    let time = if epoch.is_some() { "an epoch" } else { "a step" };
    let head = ["GPU", "memory", "safe", "recommended", "maximum", "peak", "of the GPU", time];
    let mode = chooses(question).then_some("recompute");
    let head: Vec<_> = head.into_iter().chain(mode).chain(named).collect();
    let at_once = if uses.is_empty() { "" } else { ". Evaluation and answers: the recommended batch" };
    let legend = format!(
        "Cells: micro-batch x accumulation, for {} samples a step on each of {}. Peak: of the recommended micro-batch. Times {}{at_once}",
        question.samples(),
        ranks(question.world),
        StepTime::assumption(),
    );
    let legend = words(&legend, width()).join("\n");
    let basis = words(&basis(outlooks), width()).join("\n");
    [subject(question), grid(&head, &rows), legend, basis].join("\n\n")
}

/// The run: model, what trains, the longest sample.
fn subject(question: &Question) -> String {
    let spec = question.subject.spec();
    let told = question.subject.describe();
    let mut lines = vec![format!("run        {}", spec.run.name)];
    lines.extend(told.into_iter().map(|(label, text)| format!("{label:<10} {text}")));
    lines.push(format!(
        "step       {} samples, {} on each of {}, recompute {}{}{}",
        spec.train.global_batch,
        question.samples(),
        ranks(question.world),
        spec.train.recompute,
        question.subject.precision().map_or(String::new(), |words| format!(", {words}")),
        match (spec.memory.offload, spec.memory.shard) {
            (Offload::Layers, _) => ", frozen layers streamed",
            (Offload::Embedding, Shard::None) => ", embedding table in host memory",
            (_, Shard::Frozen) => ", frozen layers sharded",
            _ => "",
        },
    ));
    let flops = question.flops();
    lines.push(format!(
        "compute    {} a step: {} forward, {} backward",
        human::flops(flops.total()),
        human::flops(flops.forward),
        human::flops(flops.backward)
    ));
    lines.join("\n")
}

/// One row for each value of a key, one column for each memory.
pub fn varied(key: &str, variants: &[Variant]) -> String {
    let Some(first) = variants.first() else { return String::new() };
    let memories = first.outlooks.iter().map(|outlook| outlook.memory.name.as_str());
    let head: Vec<_> = [key].into_iter().chain(memories).collect();
    let cell = |outlook: &Outlook| match outlook.best() {
        None => "-".to_owned(),
        Some(Split { micro_batch, accumulation, peak }) => {
            format!("{micro_batch} x {accumulation}  {}", human::bytes(peak))
        }
    };
    let row = |variant: &Variant| {
        let cells = variant.outlooks.iter().map(cell);
        [variant.value.clone()].into_iter().chain(cells).collect::<Vec<_>>()
    };
    let rows: Vec<_> = variants.iter().map(row).collect();
    let legend = format!(
        "Cells: recommended micro-batch x accumulation, for {} samples a step on each of {}, and peak memory. `-`: not even one sample fits",
        first.question.samples(),
        ranks(first.question.world),
    );
    let tail = [legend, basis(&first.outlooks)].map(|text| words(&text, width()).join("\n"));
    let name = format!("run        {}", first.question.subject.spec().run.name);
    [name, grid(&head, &rows), tail.join("\n")].join("\n\n")
}

fn of_memory(question: &Question, outlook: &Outlook) -> String {
    let mut parts = vec![title(&outlook.memory), categories(question, outlook)];
    let mode =
        chooses(question).then(|| format!("recompute {} (auto: the least that fits)", outlook.recompute));
    parts.extend(mode);
    parts.push(fits(question, outlook));
    if let Some(step) = outlook.step {
        let told = step.in_words(question.steps(), question.steps_per_epoch());
        parts.push(words(&told, width()).join("\n"));
    }
    let uses = question.uses(&outlook.memory);
    if !uses.is_empty() {
        parts.push(used(&uses));
    }
    let suggestions = question.suggestions(&outlook.memory);
    if !suggestions.is_empty() {
        parts.push(savings(&suggestions));
    }
    parts.join("\n\n")
}

/// Whether each memory decides what is recomputed.
fn chooses(question: &Question) -> bool {
    question.subject.spec().train.recompute == Recompute::Auto
}

fn title(memory: &Memory) -> String {
    format!(
        "{}: {} total, {} used, {} free",
        memory.name,
        human::bytes(memory.total),
        human::bytes(memory.used),
        human::bytes(memory.capacity())
    )
}

fn categories(question: &Question, outlook: &Outlook) -> String {
    let capacity = outlook.memory.capacity();
    let of = |wanted| outlook.categories.iter().find(|(category, _)| *category == wanted).map_or(0, |c| c.1);
    let activations = of(Category::Activations);
    let row = |name: String, bytes: u64| [name, human::bytes(bytes), percent(bytes, capacity)];
    let mut rows: Vec<_> = outlook
        .categories
        .iter()
        .filter(|(category, bytes)| *bytes > 0 && *category != Category::Activations)
        .map(|(category, bytes)| row(category.to_string(), *bytes))
        .collect();
    let kept = outlook.activations_kept.min(activations);
    rows.push(row("activations kept".into(), kept));
    rows.push(row("activation gradients".into(), activations - kept));
    let predicted: u64 = outlook.categories.iter().map(|(_, bytes)| bytes).sum();
    if predicted != outlook.current.peak {
        let learned = outlook.current.peak as i64 - predicted as i64;
        rows.push(["calibration".into(), signed(learned), String::new()]);
    }
    rows.push(row("peak".into(), outlook.current.peak));
    let head = format!("at micro-batch {}", question.micro_batch());
    let mut lines = vec![table([head.as_str(), "bytes", "of free memory"], &rows)];
    lines.extend(outlook.reserved.map(|reserved| {
        let beside = BESIDE_RESERVED + communicator(question.subject.spec(), question.world);
        let [reserved, shown] = [reserved, reserved + beside].map(human::bytes);
        format!("reserved by the allocator, in whole pages: {reserved}; nvidia-smi will show about {shown}")
    }));
    if outlook.beside_gpu > 0 {
        let beside = human::bytes(outlook.beside_gpu);
        lines.push(format!("also in host memory: {beside} of offloaded state, and cached features"));
    }
    lines.join("\n")
}

fn fits(question: &Question, outlook: &Outlook) -> String {
    let current = |option: &Choice| option.split.micro_batch == question.micro_batch();
    let rows: Vec<_> = outlook
        .options
        .iter()
        .map(|option| {
            [
                option.split.micro_batch.to_string(),
                option.split.accumulation.to_string(),
                human::bytes(option.split.peak),
                percent(option.split.peak, outlook.memory.capacity()),
                verdict(option.verdict).to_owned(),
                if current(option) { "<- the run file's".to_owned() } else { String::new() },
            ]
        })
        .collect();
    let head = ["micro-batch", "accumulation", "peak", "of free memory", "verdict", ""];
    format!("{}\n\n{}", table(head, &rows), bounds(question, outlook))
}

/// The micro-batches that fit, and what the present one is.
fn bounds(question: &Question, outlook: &Outlook) -> String {
    format!(
        "micro-batch: maximum {}, recommended {} (a tenth free), safe {} (a quarter free); the run file has {}: {}",
        micro(outlook.fit.maximum),
        micro(outlook.fit.recommended),
        micro(outlook.fit.safe),
        question.micro_batch(),
        verdict(outlook.verdict)
    )
}

/// What else fits at once, a row for each use.
fn used(uses: &[UseEstimate]) -> String {
    let row = |used: &UseEstimate| {
        let what = match used.using {
            Use::Evaluation => "held-out samples (eval.batch)",
            Use::Answers => "prompts answered (cox generate --batch)",
        };
        let UseEstimate { batch, verdict: now, fit, .. } = *used;
        let fits = [fit.maximum, fit.recommended, fit.safe].map(micro);
        let [maximum, recommended, safe] = fits;
        [what.to_owned(), maximum, recommended, safe, format!("{batch}: {}", verdict(now))]
    };
    let rows: Vec<_> = uses.iter().map(row).collect();
    table(["other batches", "maximum", "recommended", "safe", "run file"], &rows)
}

fn micro(micro: Option<u64>) -> String {
    micro.map_or_else(|| "none".into(), |micro| micro.to_string())
}

fn savings(suggestions: &[Suggestion]) -> String {
    let rows: Vec<_> = suggestions
        .iter()
        .map(|suggestion| [signed(suggestion.saves), suggestion.what.clone(), suggestion.setting.clone()])
        .collect();
    let remarks: Vec<_> = suggestions.iter().map(|suggestion| suggestion.remark.clone()).collect();
    remarked(["saves", "what would help", "setting"], &rows, &remarks, width())
}

fn basis(outlooks: &[Outlook]) -> String {
    let Some(outlook) = outlooks.first() else { return String::new() };
    let tolerance = outlook.basis.tolerance_percent();
    match outlook.basis {
        Basis::Calibrated { runs } => format!(
            "calibrated by {runs} run{} of this model on this machine: within {tolerance} % of the peak",
            if runs == 1 { "" } else { "s" }
        ),
        Basis::Analytic if outlook.memory.is_gpu => {
            "analytic: from sizes alone, with fused kernels; compared with measurements on CPUs, an emulated GPU and one H200".into()
        }
        Basis::Analytic => format!(
            "analytic: from sizes alone, within {tolerance} % of the peak; a finished run on this machine calibrates the next plan"
        ),
    }
}

/// Everything about the run in each memory, as JSON.
pub fn json(question: &Question, outlooks: &[Outlook]) -> Value {
    let (subject, spec) = (&question.subject, question.subject.spec());
    let of = |memory: &Memory| question.suggestions(memory);
    let memories = outlooks.iter().map(|outlook| {
        let mut value = json!(outlook);
        let named = outlook.categories.iter().map(|(category, bytes)| (json!(category), json!(bytes)));
        let named = named.filter_map(|(category, bytes)| Some((category.as_str()?.to_owned(), bytes)));
        value["categories"] = Value::Object(named.collect());
        value["suggestions"] = json!(of(&outlook.memory));
        value["uses"] = json!(question.uses(&outlook.memory));
        value
    });
    let mut plan = json!({
        "run": spec.run.name,
        "world": question.world,
        "samples_of_a_rank": question.samples(),
        "micro_batch": question.micro_batch(),
        "flops": question.flops(),
        "memories": memories.collect::<Vec<_>>(),
    });
    if let (Some(plan), Value::Object(sizes)) = (plan.as_object_mut(), subject.to_json()) {
        plan.extend(sizes);
    }
    plan
}

fn ranks(world: u64) -> String {
    format!("{world} rank{}", if world == 1 { "" } else { "s" })
}

fn percent(part: u64, whole: u64) -> String {
    format!("{:.1} %", 100.0 * part as f64 / whole.max(1) as f64)
}

fn signed(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "" };
    format!("{sign}{}", human::bytes(bytes.unsigned_abs()))
}

fn verdict(verdict: FitVerdict) -> &'static str {
    match verdict {
        FitVerdict::Safe => "safe",
        FitVerdict::Good => "good",
        FitVerdict::Tight => "tight",
        FitVerdict::TooLarge => "does not fit",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_and_signs_shown() {
        assert_eq!(signed(-(1 << 20)), "-1.0 MiB");
    }
}
