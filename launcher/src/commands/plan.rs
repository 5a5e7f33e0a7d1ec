//! `cox plan`: what a run will take on each rank, before anything is started. Reads sizes and metadata; no
//! weights, no GPU.

use std::time::Instant;

use clap::Args;
use coxswain_proto::run_spec::RunSpec;
use coxswain_worker::memory;
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike,
};

use super::spec_args::{ON_GPU, SpecArgs};
use crate::{
    clock,
    exit::{CliError, Outcome},
    gpu::named::GpuKind,
    plan::{
        Question,
        capacity::Memory,
        check,
        vary::{Variant, Vary},
    },
    render::{plan as render, say},
};

/// Flags of `cox plan`.
#[derive(Args, Debug)]
pub struct PlanArgs {
    #[command(flatten)]
    spec: SpecArgs,
    /// GPU to plan for, by memory (24GiB) or name (A100-40); repeatable
    #[arg(long, value_name = "GPU", value_parser = GpuKind::parse)]
    gpu: Vec<GpuKind>,
    /// Print one row for each usual GPU: micro-batch x accumulation, peak, time
    #[arg(long, conflicts_with = "gpu")]
    all_gpus: bool,
    /// Print one row for each value of a key, such as lora.rank=8,16,32
    #[arg(long, value_name = "KEY=VALUE,..", value_parser = Vary::parse)]
    vary: Option<Vary>,
    /// World size [default: launch.nproc_per_node, else 1]
    #[arg(long, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..))]
    world: Option<u32>,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// What this process took so far: elapsed and computed milliseconds, most bytes allocated at once.
fn cost(began: Instant) -> serde_json::Value {
    let computed = getrusage(UsageWho::RUSAGE_SELF)
        .map(|used| (used.user_time() + used.system_time()).num_milliseconds());
    serde_json::json!({
        "ms": began.elapsed().as_millis() as u64,
        "cpu_ms": computed.ok(),
        "allocated_peak": memory::peak(),
    })
}

/// Predicts, shows, and fails if the run does not fit.
pub fn execute(args: &PlanArgs) -> Outcome {
    let began = clock::now();
    if let Some(vary) = &args.vary {
        return varied(args, vary, began);
    }
    let question = question(args, &[])?;
    let memories = memories(args, &question);
    let outlooks: Vec<_> = memories.iter().map(|memory| question.outlook(memory)).collect();
    match (args.json, args.all_gpus) {
        (true, _) => {
            let mut value = render::json(&question, &outlooks);
            value["cost"] = cost(began);
            say(value)
        }
        (false, true) => say(render::overview(&question, &outlooks)),
        (false, false) => say(render::outlooks(&question, &outlooks)),
    };
    if args.all_gpus {
        return Ok(());
    }
    check::shortfall(&question, &memories).map_or(Ok(()), |shortfall| Err(shortfall.refusal()))
}

/// Shows what each value of a key makes of the run. One that does not fit is a row
/// like any other, not a failure.
fn varied(args: &PlanArgs, vary: &Vary, began: Instant) -> Outcome {
    let mut variants = Vec::new();
    for (value, change) in vary.changes() {
        let question = question(args, &[change])?;
        let memories = memories(args, &question);
        let outlooks = memories.iter().map(|memory| question.outlook(memory)).collect();
        variants.push(Variant { value: value.to_owned(), question, outlooks });
    }
    match args.json {
        true => {
            let plans = variants.iter().map(|variant| {
                let mut plan = render::json(&variant.question, &variant.outlooks);
                plan["value"] = serde_json::json!(variant.value);
                plan
            });
            let plans: Vec<_> = plans.collect();
            say(serde_json::json!({"vary": vary.key, "plans": plans, "cost": cost(began)}))
        }
        false => say(render::varied(&vary.key, &variants)),
    };
    Ok(())
}

/// The run file's run with these changes on top.
fn question(args: &PlanArgs, changes: &[String]) -> Result<Question, CliError> {
    let for_gpus = args.all_gpus || !args.gpu.is_empty();
    let yielding = for_gpus.then(|| ON_GPU.to_owned());
    let changes: Vec<_> = changes.iter().cloned().chain(yielding).collect();
    let spec = args.spec.load_with(&changes)?;
    let local = local_ranks(&spec);
    let world = args.world.map_or(local, u64::from);
    spec.check_world(world as usize)?;
    Question::new(&spec, world, local)
}

fn memories(args: &PlanArgs, question: &Question) -> Vec<Memory> {
    let spec = question.subject.spec();
    match (args.all_gpus, args.gpu.is_empty()) {
        (true, _) => GpuKind::overview().into_iter().map(|gpu| Memory::of_gpu(gpu, false)).collect(),
        (false, false) => args.gpu.iter().map(|gpu| Memory::of_gpu(gpu.clone(), false)).collect(),
        (false, true) => Memory::here(spec, spec.launch.device, local_ranks(spec)),
    }
}

fn local_ranks(spec: &RunSpec) -> u64 {
    spec.launch.nproc_per_node.unwrap_or(1) as u64
}
