//! `cox model`: the model without a run.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use coxswain_models::qwen2_5_vl::forward::Job;
use coxswain_proto::{run_spec::DeviceChoice, vla_flow::WeightsDtype};
use coxswain_worker::device;

use crate::{
    accelerator::accelerator,
    exit::{Exit, Failed, Outcome},
    render::say,
};

/// Subcommands of `cox model`.
#[derive(Debug, Subcommand)]
pub enum ModelCommand {
    /// One forward pass from file to file: every layer's output, logits, and with labels the loss and the adapter's gradients
    Forward(ForwardArgs),
}

/// Flags of `cox model forward`.
#[derive(Args, Debug)]
pub struct ForwardArgs {
    /// Hugging Face directory of a Qwen2.5-VL checkpoint
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// PEFT directory of a LoRA adapter
    #[arg(long, value_name = "PEFT_DIR")]
    adapter: Option<PathBuf>,
    /// safetensors: input_ids, attention_mask, pixel_values, image_grid_thw, and labels if wanted
    #[arg(long, value_name = "FILE")]
    inputs: PathBuf,
    /// safetensors: image_features, lm.layer{i}, last_hidden_state, logits, position_ids, loss, grad.*
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Where to compute: `cpu`, `cuda` (the first card that this process sees), or `auto`
    #[arg(long, value_name = "auto|cpu|cuda", default_value_t = DeviceChoice::Cpu)]
    device: DeviceChoice,
    /// Keep the model's matrices in bfloat16 instead of float32
    #[arg(long)]
    bfloat16: bool,
}

/// Runs one of them.
pub fn execute(command: &ModelCommand) -> Outcome {
    let ModelCommand::Forward(args) = command;
    let device = device::choose(args.device, 0, accelerator())
        .map_err(|missing| Failed::usage(format!("--device {}: {missing}", args.device)))?;
    let job = Job {
        model: &args.model,
        adapter: args.adapter.as_deref(),
        inputs: &args.inputs,
        out: &args.out,
        dtype: if args.bfloat16 { WeightsDtype::Bfloat16 } else { WeightsDtype::Float32 },
    };
    device::forward(&job, device, accelerator()).map_err(|error| Failed::new(Exit::BadInput, error))?;
    say(format_args!("written to {}", args.out.display()));
    Ok(())
}
