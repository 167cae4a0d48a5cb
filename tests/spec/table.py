"""Titles of the original specification and their tests. `python tests/spec/table.py` prints them as Markdown.

The titles are quoted; tests/spec/test_coverage.py checks that every test exists and names its title.
"""

STAGE2 = "test_stage2.py"
SHARDS = "test_shards.py"
MIGRATION_TESTS = "test_migration.py"
STAGE_A = "test_stage_a.py"
PRESETS_TESTS = "test_presets.py"

# In STAGE2, SHARDS and STAGE_A the name follows from the title: see `name_of`.
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

STAGE_A_SCENARIOS = (
    "Basic directory with 3 images in one group",
    "Empty summary validation",
    "Default behavior remains per_group",
    "Legacy batching flag is rejected",
    "Sampling preserves group counts in per_image mode",
    "Same groups, different texts are allowed",
    "per_group batching is group-local",
    "per_image sharding improves balance without changing group contract",
    "Merge order is not a correctness criterion",
    "Missing image result causes group failure only",
    "Default cleanup of intermediate files",
    "Keep intermediate files for debugging",
)

# MIGRATION: headings and bullets → tests.
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

# PRESETS: notes, decisions and their points, invariants, acceptance checks → tests.
PRESETS = {
    "Note on CLI flags: No new runner flags are introduced for `public_data/run.sh`": (
        "test_note_runner_grammar_remains_stable"
    ),
    "Max-object configuration: `PUBLIC_DATA_MAX_OBJECTS` remains the supported user-facing knob": (
        "test_note_variable_remains_the_knob"
    ),
    "Max-object configuration: if the values are identical, proceed": "test_note_identical_values_proceed",
    "Max-object configuration: otherwise, fail fast with an actionable error (do not silently override)": (
        "test_note_differing_values_fail_fast"
    ),
    "Decision 1: Canonical preset JSONL layout": "test_decision_1_canonical_preset_jsonl_layout",
    "Decision 2: Canonical max-object suffix": "test_decision_2_canonical_max_object_suffix",
    "Decision 2: Treat `_max_{N}` as invalid after migration (fail-fast with an actionable rename hint)": (
        "test_decision_2_old_suffix_is_invalid"
    ),
    "Decision 3: Single-source preset resolution": "test_decision_3_single_source_preset_resolution",
    "Decision 4: Derived preset image sharing (no byte-copy)": "test_decision_4_derived_preset_image_sharing",
    "Decision 4: Keep JSONL `images[0]` stable as `images/...` (no `..` path components)": (
        "test_decision_4_paths_are_stable"
    ),
    "Decision 4: Materialize the derived preset's `images/` as a real directory containing hardlinks": (
        "test_decision_4_images_is_a_real_directory"
    ),
    "Decision 4: If hardlink creation fails for any reason, the pipeline MUST fail fast (no byte-copy fallback)": (
        "test_decision_4_failing_hardlink_fails_fast"
    ),
    "Decision 4: Never use a directory symlink for `images/`": "test_decision_4_no_directory_symlink",
    "Dedup: The base rescale stage is the only place that is allowed to create resized pixels": (
        "test_dedup_pixels_are_created_in_the_base_only"
    ),
    "Dedup: If a source image already matches the target `(width, height)`, the rescale implementation MAY copy it as-is": (
        "test_dedup_image_of_the_target_size_is_copied"
    ),
    "Dedup: Derived presets do not rescale images": "test_dedup_derived_presets_do_not_rescale",
    "Dedup: The pipeline MUST precheck this and fail fast with an actionable hint if the filesystem contract is violated": (
        "test_dedup_file_system_is_prechecked"
    ),
    "Dedup: If the base preset is missing an expected resized image, the derived preset MUST fail fast": (
        "test_dedup_missing_base_image_fails_fast"
    ),
    "Hardlink contract: For every `images/...` path referenced, the derived preset MUST contain a file": (
        "test_hardlink_contract_every_path_is_there"
    ),
    "Hardlink contract: That file MUST be a hardlink to the base preset's corresponding resized image file": (
        "test_hardlink_contract_every_file_is_the_bases"
    ),
    "Hardlink contract: if the destination path does not exist: create the hardlink": (
        "test_hardlink_contract_absent_path_is_linked"
    ),
    "Hardlink contract: if the destination path exists and is already the same inode as the source: do nothing": (
        "test_hardlink_contract_same_inode_is_left"
    ),
    'Hardlink contract: otherwise: fail fast (do not overwrite or "repair" in place)': (
        "test_hardlink_contract_other_file_fails_fast"
    ),
    "Decision 5: Unified validation boundary": "test_decision_5_unified_validation_boundary",
    "Decision 6: Parallelism policy": "test_decision_6_parallelism_policy",
    "Decision 6: Metadata scans (counting lines, collecting unique image specs) remain sequential": (
        "test_decision_6_metadata_scans_remain_sequential"
    ),
    "Validation determinism: Any structural failure is a validator failure": (
        "test_determinism_structural_failure_is_a_failure"
    ),
    "Validation determinism: The validator MUST still scan the full JSONL to completion to report stable summary counts": (
        "test_determinism_full_file_is_scanned"
    ),
    "Validation determinism: Select exactly the first `N` structurally-parsed records in JSONL line order": (
        "test_determinism_first_records_are_selected"
    ),
    "Validation determinism: Run image checks on those records in that exact order": (
        "test_determinism_order_is_that_of_the_file"
    ),
    "Validation determinism: Do not skip, replace, or resample any of those `N` records": (
        "test_determinism_no_record_is_replaced"
    ),
    "Invariant: Preset `images/` are immutable once written by the rescale stage": "test_invariant_images_are_immutable",
    "Invariant: allowed: create-missing only": "test_invariant_missing_images_are_created",
    "Invariant: disallowed: truncate/overwrite/replace existing paths in-place": (
        "test_invariant_existing_images_are_not_overwritten"
    ),
    "Invariant: `pipeline_manifest.json` MUST record the rescale-affecting parameters": (
        "test_invariant_manifest_records_the_parameters"
    ),
    "Invariant: The rescale stage MUST compare the requested rescale params against the recorded params": (
        "test_invariant_parameters_are_compared_before_any_work"
    ),
    "Invariant: If the recorded params are missing or differ, rescale MUST fail fast with an actionable rebuild hint": (
        "test_invariant_missing_parameters_fail_fast"
    ),
    "Invariant: If `pipeline_manifest.json` is missing but the preset directory already exists, do not infer params": (
        "test_invariant_missing_manifest_fails_fast"
    ),
    "Invariant: rebuild is manual: the user either picks a new preset name or deliberately deletes the directory": (
        "test_invariant_rebuild_is_manual"
    ),
    "Risk: tools that repair or overwrite image files could mutate the shared inode across presets": (
        "test_risk_coord_writes_no_image"
    ),
    "Acceptance: ./public_data/run.sh coco rescale --preset rescale_32_768_bbox": "test_acceptance_base_preset_creation",
    "Acceptance: PUBLIC_DATA_MAX_OBJECTS=60 ./public_data/run.sh coco coord --preset rescale_32_768_bbox": (
        "test_acceptance_derived_preset_creation"
    ),
    "Acceptance: Training preflight validation uses the unified validator": (
        "test_acceptance_preflight_enforces_max_pixels_and_multiple_of"
    ),
}


def name_of(scenario: str) -> str:
    """A scenario's title in snake case."""
    words = "".join(sign if sign.isalnum() else " " for sign in scenario.lower()).split()
    return "_".join(["test", *words])


TESTS = {
    STAGE2: {title: name_of(title) for title in SCENARIOS},
    SHARDS: {title: name_of(title) for title in SHARD_SCENARIOS},
    MIGRATION_TESTS: MIGRATION,
    STAGE_A: {title: name_of(title) for title in STAGE_A_SCENARIOS},
    PRESETS_TESTS: PRESETS,
}


def markdown() -> str:
    lines = []
    for file, tests in TESTS.items():
        lines += [f"tests/spec/{file}", "", "| title | test |", "| --- | --- |"]
        lines += [f"| {title} | `{name}` |" for title, name in tests.items()]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
