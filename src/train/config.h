// What a training run is, read from JSON. DeepSeek's recipe (dense, indexer warm-up, sparse) is a
// list of stages; any other list is as good.
//
// Both losses are means: the language loss over the tokens of a step, the indexer's KL over the same
// rows, summed over layers and multiplied by index_loss_coefficient. Rows of padding are none. Each
// depth of multi-token prediction has a mean over its own tokens; their mean is multiplied by
// mtp_loss_coefficient. How a step is packed and cut into micro-batches changes none of them.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "model/recompute.h"

namespace winnow::train {

// The text is documents, which are packed into sequences and attend to themselves alone.
struct DocumentsConfig {
  std::string separator;           // ends a document and belongs to it; "": only a file's end does
  std::int64_t max_documents = 0;  // in a sequence; default: as many as it has room for
  std::int64_t length_multiple = 1;  // rows of a document are padded to a multiple of it
};

struct DataConfig {
  std::string path;                   // a text file, read as bytes; of documents a folder, too
  double validation_fraction = 0.05;  // of the bytes, held out from the end of the text
  std::optional<DocumentsConfig> documents;  // none: a sequence is a stretch of the text
  std::int64_t context = 0;                  // rows of a sequence
  std::int64_t batch_sequences = 0;          // sequences of a step
  std::int64_t micro_batch_sequences = 0;    // in memory at a time, at most; default: all of them
  std::int64_t validation_windows = 16;      // windows read while training; the end reads all
};

struct OptimizerConfig {
  double beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8;
  double weight_decay = 0.1;  // decoupled; on matrices only
  double clip_norm = 1;       // of the model's gradient, and of the indexers', each by itself
};

// How many processes share a run, and its steps' sequences: cp x dp (train/ranks.h).
struct ParallelConfig {
  std::int64_t cp = 1;  // ranks that hold the rows of one sequence between them
  std::int64_t dp = 0;  // shares of a step's sequences; 0: as many as fit the processes
};

struct StageConfig {
  std::string name;
  attention::AttentionMode attention = attention::AttentionMode::kDense;
  std::int64_t steps = 0;
  double learning_rate = 0;        // the peak, after warmup_steps
  double final_learning_rate = 0;  // at the end of the stage
  std::int64_t warmup_steps = 0;
  double index_loss_coefficient = 0;
  double mtp_loss_coefficient = 0;  // of the mean over depths; default 0.1 where depths train
};

struct TrainConfig {
  model::ModelConfig model;
  DataConfig data;
  OptimizerConfig optimizer;
  std::vector<StageConfig> stages;
  ParallelConfig parallel;
  model::Recompute recompute;         // changes memory and time, and no bit of the curve
  std::int64_t checkpoint_every = 0;  // steps; 0: only at the end and when asked to stop
  std::int64_t validate_every = 0;    // steps; 0: only at the end
  std::int64_t health_every = 0;      // steps; 0: never (train/health.h)
  std::uint64_t seed = 1;
  // A run's output folder or a checkpoint's, whose weights the run begins with; "": random ones.
  std::string initial_checkpoint;
  std::string output;  // a folder
};

// What a configuration is read for.
enum class Purpose {
  kRun,   // all that a run needs
  kPlan,  // what only a run needs may be left out: text, output folder, optimizer's rates; the
          // vocabulary may be any, and an object "plan" may stand beside (plan/config.h)
};

// Unknown keys are refused with the nearest valid one, missing and broken ones by name and value.
TrainConfig read_train_config(const nlohmann::json& json);
TrainConfig read_train_config(const nlohmann::json& json, Purpose purpose, Rules& rules);
nlohmann::json write_train_config(const TrainConfig& config);

// The file's content; text that is not JSON is an error that names the line. Paths stay relative
// to the folder that the program runs in.
TrainConfig read_train_config_file(const std::filesystem::path& path);
nlohmann::json read_config_file(const std::filesystem::path& path);

// Of a configuration whose parallel.dp is known: a step's sequences can be shared so.
void check_parallel(const TrainConfig& config, Rules& rules);
// Of a step, on one rank: its sequences, and how many of them are in memory at a time.
std::int64_t sequences_of_a_rank(const TrainConfig& config);
std::int64_t sequences_at_once(const TrainConfig& config);

// The first key whose value differs, such as "stages[1].steps", of those that decide the loss
// curve; "" if there is none.
std::string first_difference(const TrainConfig& a, const TrainConfig& b);
// Of all keys that either has.
std::string first_difference(const nlohmann::json& a, const nlohmann::json& b);

std::int64_t total_steps(const TrainConfig& config);
const char* attention_mode_name(attention::AttentionMode mode);  // "dense", "warmup", "sparse"

}  // namespace winnow::train
