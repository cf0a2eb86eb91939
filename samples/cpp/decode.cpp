// Decodes one prompt with an engine directory, in C++ and ONNX Runtime alone.
//
//     decode ENGINE MAX_NEW_TOKENS TOKEN_ID...
//
// prints the new token ids on one line and, on standard error, how many steps they took. Greedy; one sequence.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include <onnxruntime_cxx_api.h>

using Json = nlohmann::json;
using Tokens = std::vector<int64_t>;

constexpr int64_t kPrefillChunk = 512;
const std::set<std::string> kGiven = {"tokens", "num_tokens", "num_known", "lengths", "next_tokens"};

Json read_config(const std::string& directory) {
    std::ifstream file(directory + "/config.json");
    if (!file) throw std::runtime_error(directory + "/config.json cannot be read; give a directory that `speccompile build` wrote.");
    Json settings = Json::parse(file).at("speccompile");
    if (settings.at("contract_version") != 3) throw std::runtime_error("This sample reads step contract version 3.");
    if (settings.at("step_file") != "rank0.onnx") throw std::runtime_error("This sample runs ONNX engines (--backend onnxruntime).");
    return settings;
}

// The fused step. Every cache is one buffer, bound as an input and as all outputs that continue it, so that ONNX Runtime
// writes the new rows in place.
class Step {
  public:
    Step(const std::string& directory, const Json& settings)
        : environment_(ORT_LOGGING_LEVEL_ERROR, "speccompile"),
          session_(environment_, (directory + "/rank0.onnx").c_str(), Ort::SessionOptions{}),
          binding_(session_) {
        // Small tensors are int64 or float32; their dimensions are numbers, or "batch", which is 1 here.
        for (const auto& tensor : settings.at("tensors")) {
            const std::string name = tensor.at("name");
            const bool is_cache = settings.at("caches").contains(name), is_input = tensor.at("role") == "input";
            const bool is_given = is_input && !is_cache && kGiven.count(name);
            if (is_given) inputs_.insert(name);
            if (tensor.contains("bound_to") || is_given) continue;  // zeros are given for the rest: a temperature of 0 is greedy
            std::vector<int64_t> shape;
            for (const auto& dimension : tensor.at("shape")) shape.push_back(dimension.is_string() ? 1 : dimension.get<int64_t>());
            add(name, shape, tensor.at("dtype"));
            if (is_input) binding_.BindInput(name.c_str(), values_.at(name));
            else binding_.BindOutput(name.c_str(), values_.at(name));
        }
        for (const auto& [output, cache] : settings.at("aliases").at("rank0.onnx").items())
            binding_.BindOutput(output.c_str(), values_.at(cache));
    }

    // `tokens`, of which the first `known` are given and the rest proposed, after `length` committed ones. `next` is the
    // token after the known ones where the prompt has one, else -1.
    void run(Tokens tokens, int64_t known, int64_t length, int64_t next) {
        const auto memory = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeCPU);
        const auto count = static_cast<int64_t>(tokens.size());
        std::map<std::string, Tokens> given = {
            {"tokens", std::move(tokens)}, {"num_tokens", {count}}, {"num_known", {known}}, {"lengths", {length}}, {"next_tokens", {next}}};
        for (auto& [name, data] : given) {
            if (!inputs_.count(name)) continue;  // only chain drafts ask for the next token
            const std::vector<int64_t> shape = name == "tokens" ? std::vector<int64_t>{1, count} : std::vector<int64_t>{1};
            binding_.BindInput(name.c_str(), Ort::Value::CreateTensor<int64_t>(memory, data.data(), data.size(), shape.data(), shape.size()));
        }
        session_.Run(Ort::RunOptions{}, binding_);
    }

    // The first `count` elements of a small output; all of it unless told.
    Tokens read(const std::string& name, size_t count = SIZE_MAX) const {
        const auto& value = values_.at(name);
        const auto* data = value.GetTensorData<int64_t>();
        return Tokens(data, data + std::min(count, value.GetTensorTypeAndShapeInfo().GetElementCount()));
    }

    bool has(const std::string& name) const { return values_.count(name) > 0; }

  private:
    void add(const std::string& name, const std::vector<int64_t>& shape, const std::string& dtype) {
        static const std::map<std::string, std::pair<ONNXTensorElementDataType, size_t>> types = {
            {"int64", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, 8}},
            {"float32", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4}},
            {"float16", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, 2}}};
        const auto [type, bytes] = types.at(dtype);
        auto value = Ort::Value::CreateTensor(allocator_, shape.data(), shape.size(), type);
        std::memset(value.GetTensorMutableRawData(), 0, bytes * value.GetTensorTypeAndShapeInfo().GetElementCount());
        values_.emplace(name, std::move(value));
    }

    Ort::Env environment_;
    Ort::Session session_;
    Ort::IoBinding binding_;
    Ort::AllocatorWithDefaultOptions allocator_;
    std::map<std::string, Ort::Value> values_;
    std::set<std::string> inputs_;
};

Tokens decode(Step& step, const Json& settings, const Tokens& prompt, size_t budget, int& steps) {
    const Tokens stop = settings.at("stop_token_ids");
    const size_t longest = settings.at("max_seq_len");
    int64_t length = 0;
    for (size_t fed = 0; fed < prompt.size();) {
        const size_t end = std::min(fed + kPrefillChunk, prompt.size());
        const Tokens chunk(prompt.begin() + fed, prompt.begin() + end);
        step.run(chunk, chunk.size(), length, end < prompt.size() ? prompt[end] : -1);
        length = step.read("new_lengths")[0];
        fed = end;
    }
    Tokens produced;
    for (steps = 0;; ++steps) {
        for (const int64_t token : step.read("emitted", step.read("num_emitted")[0])) {
            produced.push_back(token);
            if (std::count(stop.begin(), stop.end(), token) || produced.size() == budget || prompt.size() + produced.size() > longest)
                return produced;
        }
        // The draft may hold its last proposals too improbable to be worth a row (--confidence-threshold).
        step.run(step.read("block", step.has("num_proposed") ? 1 + step.read("num_proposed")[0] : SIZE_MAX), 1, length, -1);
        length = step.read("new_lengths")[0];
    }
}

int main(int count, char** arguments) {
    if (count < 4) {
        std::cerr << "usage: decode ENGINE MAX_NEW_TOKENS TOKEN_ID...\n";
        return 2;
    }
    try {
        const std::string directory = arguments[1];
        const Json settings = read_config(directory);
        const size_t budget = std::stoul(arguments[2]), longest = settings.at("max_seq_len");
        Tokens prompt;
        for (int i = 3; i < count; ++i) prompt.push_back(std::stoll(arguments[i]));
        if (budget < 1 || prompt.size() > longest) throw std::runtime_error("Give at least one new token, and a prompt of at most " + std::to_string(longest) + ".");
        for (const int64_t token : prompt)
            if (token < 0 || token >= settings.at("vocab_size")) throw std::runtime_error("Token " + std::to_string(token) + " is outside the vocabulary.");
        Step step(directory, settings);
        int steps = 0;
        const Tokens produced = decode(step, settings, prompt, budget, steps);
        for (size_t i = 0; i < produced.size(); ++i) std::cout << (i ? " " : "") << produced[i];
        std::cout << "\n";
        std::cerr << produced.size() << " tokens in " << steps << " decode steps\n";
    } catch (const std::exception& error) {
        std::cerr << "decode: " << error.what() << "\n";
        return 2;
    }
}
