//! `cox model`: the model without a run.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use coxswain_nn::dtypes::FrozenDtype;
use coxswain_proto::run_spec::DeviceChoice;
use coxswain_task::ForwardJob;
use coxswain_worker::device;

use crate::{
    exit::{Exit, Failed, Outcome},
    render::say,
    tasks::{accelerator, tasks},
};

/// Subcommands of `cox model`.
#[derive(Debug, Subcommand)]
pub enum ModelCommand {
    /// One forward pass from file to file: every layer's output, logits, and with labels the loss and the
    /// adapter's gradients
    Forward(ForwardArgs),
}

/// Flags of `cox model forward`.
#[derive(Args, Debug)]
pub struct ForwardArgs {
    /// Hugging Face directory of a model that some task trains
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// PEFT directory of a LoRA adapter
    #[arg(long, value_name = "PEFT_DIR")]
    adapter: Option<PathBuf>,
    /// safetensors: what the model takes (`cox data sample` writes such a file), and labels if wanted
    #[arg(long, value_name = "FILE")]
    inputs: PathBuf,
    /// safetensors: every intermediate result under the model's own names, loss, grad.*
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Where to compute: `cpu`, `cuda` (the first GPU that this process sees), or `auto`
    #[arg(long, value_name = "auto|cpu|cuda", default_value_t = DeviceChoice::Cpu)]
    device: DeviceChoice,
    /// Keep the model's matrices in bfloat16 instead of float32
    #[arg(long)]
    bfloat16: bool,
    /// Keep them in float16, and multiply in it: on a GPU
    #[arg(long, conflicts_with = "bfloat16")]
    float16: bool,
}

/// Runs one of them.
pub fn execute(command: &ModelCommand) -> Outcome {
    let ModelCommand::Forward(args) = command;
    let device = device::choose(args.device, 0, accelerator())
        .map_err(|missing| Failed::usage(format!("--device {}: {missing}", args.device)))?;
    let job = ForwardJob {
        model: &args.model,
        adapter: args.adapter.as_deref(),
        inputs: &args.inputs,
        out: &args.out,
        dtype: match (args.bfloat16, args.float16) {
            (true, _) => FrozenDtype::Bfloat16,
            (false, true) => FrozenDtype::Float16,
            (false, false) => FrozenDtype::Float32,
        },
    };
    let done = tasks().forward(&job, device).ok_or_else(|| {
        Failed::usage(format!("{}: no task of this program has such a model", args.model.display()))
    })?;
    done.map_err(|error| Failed::new(Exit::BadInput, error))?;
    say(format_args!("written to {}", args.out.display()));
    Ok(())
}
