//! `cox model`: the model without a run.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use coxswain_nn::dtypes::FrozenDtype;
use coxswain_proto::run_spec::DeviceChoice;
use coxswain_task::ForwardJob;
use coxswain_worker::device;

use crate::{
    exit::{CliError, Exit, Outcome},
    render::say,
    tasks::{accelerator, tasks},
};

/// Subcommands of `cox model`.
#[derive(Debug, Subcommand)]
pub enum ModelCommand {
    /// Run one forward pass from file to file: every layer's output and logits; with labels, the loss and the
    /// adapter's gradients; for a policy, loss, velocities and sampled actions
    Forward(ForwardArgs),
}

/// Flags of `cox model forward`.
#[derive(Args, Debug)]
pub struct ForwardArgs {
    /// Model directory in Hugging Face's format, or policy directory in LeRobot's
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Directory of the backbone that the policy's config.json names [default: from Hugging Face's cache]
    #[arg(long, value_name = "DIR")]
    backbone: Option<PathBuf>,
    /// PEFT directory of a LoRA adapter
    #[arg(long, value_name = "PEFT_DIR")]
    adapter: Option<PathBuf>,
    /// safetensors file of the model's inputs (`cox data sample` writes one), with labels if the loss is
    /// wanted
    #[arg(long, value_name = "FILE")]
    inputs: PathBuf,
    /// safetensors file to write: intermediate results under the model's own names, loss, grad.*
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// For a policy, also write grad.* of the trainable tensors
    #[arg(long)]
    gradients: bool,
    /// Device: `cpu`, `cuda` (the first visible GPU), or `auto`
    #[arg(long, value_name = "auto|cpu|cuda", default_value_t = DeviceChoice::Cpu)]
    device: DeviceChoice,
    /// Keep the model's matrices in bfloat16 instead of float32
    #[arg(long)]
    bfloat16: bool,
    /// Keep the model's matrices in float16 and multiply in it (GPU only)
    #[arg(long, conflicts_with = "bfloat16")]
    float16: bool,
}

/// Runs one of them.
pub fn execute(command: &ModelCommand) -> Outcome {
    let ModelCommand::Forward(args) = command;
    let device = device::choose(args.device, 0, accelerator())
        .map_err(|missing| CliError::usage(format!("--device {}: {missing}", args.device)))?;
    let job = ForwardJob {
        model: &args.model,
        adapter: args.adapter.as_deref(),
        backbone: args.backbone.as_deref(),
        inputs: &args.inputs,
        out: &args.out,
        dtype: match (args.bfloat16, args.float16) {
            (true, _) => FrozenDtype::Bfloat16,
            (false, true) => FrozenDtype::Float16,
            (false, false) => FrozenDtype::Float32,
        },
        gradients: args.gradients,
    };
    let done = tasks().forward(&job, device).ok_or_else(|| {
        let model = args.model.display();
        let advice = "to see why, run `cox check` on a run file with this `model.path`";
        CliError::usage(format!("{model}: not the directory of a supported model; {advice}"))
    })?;
    done.map_err(|error| CliError::new(Exit::BadInput, error))?;
    say(format_args!("written to {}", args.out.display()));
    Ok(())
}
