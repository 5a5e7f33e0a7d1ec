//! `cox model`: the model without a run.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use coxswain_worker::model::qwen::forward;

use crate::{
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
}

/// Runs one of them.
pub fn execute(command: &ModelCommand) -> Outcome {
    let ModelCommand::Forward(args) = command;
    forward::run(&args.model, args.adapter.as_deref(), &args.inputs, &args.out)
        .map_err(|error| Failed::new(Exit::BadInput, error))?;
    say(format_args!("written to {}", args.out.display()));
    Ok(())
}
