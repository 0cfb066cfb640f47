"""What a run says of itself before its first step."""

import logging
import math

from wangen.generator import headers
from wangen.generator.errors import many
from wangen.generator.memory import PLAIN_MEMORY, memory_of
from wangen.generator.steps import Train
from wangen.runtime.adapter_layers import parts_of
from wangen.runtime.loader import cache_use
from wangen.runtime.training.plan import ExpertPlan, Plan
from wangen.runtime.training.run import Run, Trainee
from wangen.runtime.training.schedules import unfinished_warm_up
from wangen.runtime.training.timesteps import left_to_the_other, starving, trained_range

log = logging.getLogger("wangen")


def announce(training: Run) -> None:
    """Say what is about to be trained."""
    plan, options = training.plan, training.plan.options
    if options.max_train_epochs is not None and options.max_train_steps is not None:
        log.warning("  --max_train_steps %d is not used: --max_train_epochs %d says how long (in a script the knob "
                    "MAX_TRAIN_EPOCHS does)", options.max_train_steps, options.max_train_epochs)  # fmt: skip
    for trainee in training.trainees:
        _announce_trainee(training, trainee)
    for line in _of_two_experts(plan):
        log.warning("  %s", line)
    if options.prior_loss_weight != 1 and not any(cached.sample.entry.is_reg for cached in plan.samples):
        log.warning("  --prior_loss_weight %g is not used: no dataset says is_reg = true", options.prior_loss_weight)
    given = options.condition_frames or 0
    if short := sum(1 < cached.sample.count <= given for cached in plan.samples):
        log.warning("  --condition_frames %d: %s no longer than that; all but the end of it is given", given,
                    many(short, "clip is", "clips are"))  # fmt: skip
    if changed := _memory_flags(options):
        log.info("  memory: %s", " ".join(changed))
    use = cache_use(plan.samples)
    if use.computed:
        how = "are encoded whenever they are drawn" if options.cache_mode == "realtime" else "were encoded here"
        log.info("  %s: %d of %s from the cache, %d %s", use.mode(options.cache_mode), use.from_cache,
                 many(use.from_cache + use.computed, "entry", "entries"), use.computed, how)  # fmt: skip
    _announce_processes(training)
    if left := plan.batches_per_epoch % options.gradient_accumulation_steps:
        few = plan.batches_per_epoch < options.gradient_accumulation_steps
        log.info("  %s has %s of %d batches: an epoch has %d", "each step" if few else "the last step of each epoch",
                 left, options.gradient_accumulation_steps, plan.batches_per_epoch)  # fmt: skip
    resuming = f", resuming at {training.step}" if training.step else ""
    log.info("  %s, %s per epoch, %d steps in all%s", many(len(plan.samples), "sample"),
             many(plan.steps_per_epoch, "step"), training.num_steps, resuming)  # fmt: skip


def _announce_trainee(training: Run, trainee: Trainee) -> None:
    """Say how much of one transformer is trained, and how."""
    options = training.plan.options
    trainable = trainee.num_trained
    base = headers.read_header(trainee.plan.dit, trainee.plan.flag)  # in memory it may be parked or quantised
    total = sum(math.prod(info.shape) for info in base.tensors.values())
    total += trainable if options.train_mode == "lora" else 0
    what = "train"
    if options.train_mode == "lora":
        what += f" ({options.network_module} on {many(len(parts_of(trainee.parameters)), 'layer')})"
    name = f"{trainee.plan.name.replace('_', '-')} expert, " if trainee.plan.name else ""
    log.info("  %s%.2f M of %.2f M parameters %s, %s, attention %s, on %s", name, trainable / 1e6, total / 1e6,
             what, {"bf16": "bfloat16", "no": "float32"}[options.mixed_precision], trainee.model.attention,
             training.device)  # fmt: skip
    if trainee.plan.name:
        _announce_range(options, trainee.plan, max(trainee.plan.num_steps, trainee.step), training.num_steps)
    if line := unfinished_warm_up(options, trainee.plan.num_steps):
        log.warning("    %s", line)


def _announce_processes(training: Run) -> None:
    """Say how several processes share the work."""
    options = training.plan.options
    if training.ranks.count > 1:
        log.info("  %d processes share the %d batches of each step, as one with --gradient_accumulation_steps %d would "
                 "do them; the learning rate is for all together and stays %g", training.ranks.count,
                 options.gradient_accumulation_steps, options.gradient_accumulation_steps,
                 options.learning_rate)  # fmt: skip
    if training.is_sharded:
        log.info("  weights, gradients and the optimizer's state are in parts: each process gathers a block before it "
                 "computes")  # fmt: skip
    elif training.ranks.in_step:
        log.info("  the frozen weights of the blocks are in parts: each process gathers a block before it computes")


def _of_two_experts(plan: Plan) -> list[str]:
    """What to warn of where two experts are trained: one that starves, LoRAs that are saved before one's first turn."""
    if len(plan.experts) == 1:
        return []
    options, shares = plan.options, {expert.name: expert.num_steps / plan.num_steps for expert in plan.experts}
    lines = starving(options, plan.model, shares)
    every = [options.save_every_n_steps or 0, (options.save_every_n_epochs or 0) * plan.steps_per_epoch]
    first = min(filter(None, every), default=plan.num_steps)
    for name in plan.untrained_at(first) if first < plan.num_steps else ():
        cure = f"give --expert_turn_steps {first // 2}, or save less often" if first > 1 else "save less often"
        expert = f"the {name.replace('_', '-')} expert"
        lines.append(f"the LoRAs that are saved at step {first} come before {expert}'s first turn, and its own is "
                     f"untrained: {cure}")  # fmt: skip
    return lines


def _announce_range(options: Train, expert: ExpertPlan, own_steps: int, num_steps: int) -> None:
    """Say which timesteps one of two experts is trained at, how long, and which of the wanted ones it is not."""
    log.info("    timesteps %g to %g: %.1f %% of the drawn ones, %d of %d steps",
             *trained_range(options, expert.low, expert.high), 100 * expert.share, own_steps, num_steps)  # fmt: skip
    for line in left_to_the_other(options, expert.low, expert.high):
        log.warning("    %s", line)


def _memory_flags(options: Train) -> list[str]:
    """What `--vram` chose or flags said, where it is not how a run without them is, as flags."""
    chosen = {name: value for name, value in memory_of(options).items() if value != PLAIN_MEMORY[name]}
    return [f"--{name}" if value is True else f"--{name} {value}" for name, value in chosen.items()]
