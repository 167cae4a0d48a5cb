"""Which test answers for which title of seeds 000, 001 and 002. `python tests/seeds/table.py` prints it as Markdown.

The titles are the seeds' own; tests/seeds/test_coverage.py sees to it that every test exists and names its title.
"""

SEED_000 = "test_seed_000_stage2_format.py"
SEED_001 = "test_seed_001_shards.py"
SEED_002 = "test_seed_002_migration.py"

# Of seeds 000 and 001 the name follows from the title: see `name_of`.
SCENARIOS = (
    "Output directories are created",
    "JSONL metadata is stored separately from embeddings",
    "Image ID is derived consistently",
    "Embedding files use image_id naming",
    "Metadata record contains required fields",
    "Format version identifies Stage 2 records",
    "Inline embeddings are removed",
    "DINOv3 file has correct shape",
    "DINOv3 file size is approximately 4KB",
    "VAE latent has correct shape",
    "VAE latent file size is approximately correct",
    "T5 hidden state has correct shape",
    "T5 hidden state file size is approximately 158KB",
    "Bucket assignment is based on aspect ratio",
    "All images are assigned to a bucket",
    "Bucket dimensions are divisible by 64",
    "Existing embedding file is not regenerated",
    "Partial completion can be resumed",
    "Updates are written to temporary file first",
    "Graceful shutdown merges temporary file",
    "JSONL size is reduced significantly",
    "Total Stage 2 storage is predictable",
)

SHARD_SCENARIOS = (
    "Complete sample is identified as ready",
    "Incomplete sample is skipped",
    "Malformed JSONL line is skipped gracefully",
    "Samples are grouped by bucket",
    "Bucket filter restricts output",
    "Tar entry contains all five files",
    "JSON metadata includes required fields",
    "T5 attention mask is saved as .npy",
    "Bucket directory is created",
    "Shard files use zero-padded naming",
    "Single shard for small bucket",
    "Multiple shards for large bucket",
    "Limit restricts total output",
    "Limit applies after shuffle",
    "Shuffle produces different order",
    "Seed ensures reproducibility",
    "Existing shard blocks write",
    "Overwrite flag allows replacement",
    "Dry run does not write files",
    "Dry run validates inputs",
    "Progress during scan",
    "Final summary",
    "NPY files are copied as-is",
)

# Of seed 002: headings and bullets → tests.
MIGRATION = {
    "Goals: Migrate existing JSONL to Stage 2 format without data loss": "test_goal_stage_1_is_migrated_without_data_loss",
    "Goals: Generate VAE latents for all images using Flux VAE encoder": "test_goal_every_image_gets_a_vae_latent",
    "Goals: Generate T5 hidden states for all captions": "test_goal_every_caption_gets_hidden_states",
    "Goals: Extract DINOv3 embeddings to separate .npy files": "test_goal_dinov3_embeddings_become_separate_files",
    "Goals: Add aspect ratio bucketing (record bucket assignment in JSONL)": "test_goal_bucket_is_recorded",
    "Goals: Idempotent operation (skip existing .npy files, resume from crash)": "test_goal_operation_is_idempotent",
    "Goals: Shrink JSONL from ~2GB to ~5-10MB": "test_goal_jsonl_shrinks",
    "Decision 1: Three-Pass Architecture (Optional)": "test_decision_1_three_pass_architecture",
    "Decision 2: Aspect Ratio Bucketing Strategy": "test_decision_2_aspect_ratio_bucketing_strategy",
    "Decision 3: VAE Latent Encoding": "test_decision_3_vae_latent_encoding",
    "Decision 4: T5 Hidden State Generation": "test_decision_4_t5_hidden_state_generation",
    "Decision 5: File Naming and Directory Structure": "test_decision_5_file_naming_and_directory_structure",
    "Decision 6: JSONL Format Migration Strategy": "test_decision_6_jsonl_format_migration_strategy",
    "Decision 7: Idempotency and Resumption": "test_decision_7_idempotency_and_resumption",
    "Decision 8: Batch Processing and Progress Tracking": "test_decision_8_batch_processing_and_progress_tracking",
    "Flux VAE Model Compatibility with ROCm: Test VAE encoding on single image before batch processing": (
        "test_mitigation_vae_is_tried_on_a_single_image_first"
    ),
    "Flux VAE Model Compatibility with ROCm: Have fallback to SD3 VAE if Flux VAE fails": (
        "test_mitigation_no_other_vae_steps_in"
    ),
    "Flux VAE Model Compatibility with ROCm: Log clear error messages with model name and error details": (
        "test_mitigation_error_names_the_model_and_the_details"
    ),
    "18GB Disk Space Exhaustion: Check available disk space before starting (abort if < 20GB free)": (
        "test_mitigation_disk_space_is_checked_before_starting"
    ),
    "18GB Disk Space Exhaustion: Process in chunks (e.g., 10k images at a time) if space is tight": (
        "test_mitigation_work_can_be_done_in_chunks"
    ),
    "18GB Disk Space Exhaustion: Provide `--output-base-dir` flag to write to different disk if needed": (
        "test_mitigation_outputs_may_go_to_another_disk"
    ),
    "Partial Migration State Confusion: Never delete original JSONL until migration 100% complete": (
        "test_mitigation_original_is_never_deleted"
    ),
    "Partial Migration State Confusion: Use `format_version` field to identify migration state": (
        "test_mitigation_format_version_identifies_the_state"
    ),
    "Partial Migration State Confusion: Provide `--verify` flag to scan JSONL and check .npy files consistency": (
        "test_mitigation_verify_scans_and_checks"
    ),
    "T5-Large Model Memory Footprint: Use three-pass architecture (only one model loaded at a time)": (
        "test_mitigation_models_are_loaded_one_at_a_time"
    ),
    "T5-Large Model Memory Footprint: Explicit `del model; torch.cuda.empty_cache()` between passes": (
        "test_mitigation_models_are_freed_between_passes"
    ),
    "T5-Large Model Memory Footprint: Allow `--passes` flag to run specific passes independently if needed": (
        "test_mitigation_passes_run_independently"
    ),
    "Trade-off: External Files vs Inline": "test_trade_off_external_files_versus_inline",
    "Trade-off: Float16 Precision Loss": "test_trade_off_float16_precision_loss",
    "Phase 1: Validation (Manual)": "test_phase_1_validation",
    "Phase 2: DINOv3 Extraction Pass (Safe)": "test_phase_2_dinov3_extraction_pass",
    "Phase 3: VAE Latent Generation (Slow)": "test_phase_3_vae_latent_generation",
    "Phase 4: T5 Hidden State Generation (Moderate)": "test_phase_4_t5_hidden_state_generation",
    "Phase 5: JSONL Migration (Fast)": "test_phase_5_jsonl_migration",
    "Rollback Strategy: Keep original JSONL as `approved_image_dataset.jsonl.stage1.backup`": (
        "test_rollback_original_is_kept_as_stage_1_backup"
    ),
    "Rollback Strategy: If migration fails, restore backup and delete .npy directories": (
        "test_rollback_backup_is_restored"
    ),
    "Rollback Strategy: If Stage 2 proves problematic, can regenerate inline format from .npy files": (
        "test_rollback_inline_format_is_regenerated_from_npy_files"
    ),
    "Open question 1: Flux VAE model exact name?": "test_open_question_1_vae_model_exact_name",
    "Open question 2: VAE latent normalization now or later?": (
        "test_open_question_2_latent_normalisation_is_a_separate_step"
    ),
    "Open question 3: Aspect bucket validation?": "test_open_question_3_unusual_aspect_ratio_is_a_warning",
    "Open question 4: Concurrent processing?": "test_open_question_4_concurrent_processing",
}


def name_of(scenario: str) -> str:
    """A scenario's title in snake case."""
    words = "".join(sign if sign.isalnum() else " " for sign in scenario.lower()).split()
    return "_".join(["test", *words])


TESTS = {
    SEED_000: {title: name_of(title) for title in SCENARIOS},
    SEED_001: {title: name_of(title) for title in SHARD_SCENARIOS},
    SEED_002: MIGRATION,
}


def markdown() -> str:
    lines = []
    for file, tests in TESTS.items():
        lines += [f"tests/seeds/{file}", "", "| title | test |", "| --- | --- |"]
        lines += [f"| {title} | `{name}` |" for title, name in tests.items()]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
