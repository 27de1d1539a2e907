//! NVRTC's functions, which here compile kernels with this machine's C++ compiler.

#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#ifndef EMULATOR_FOLDER
#error "the folder of device.h"
#endif
#ifndef EMULATOR_DRIVER
#error "the library of driver.cpp"
#endif

namespace {

enum : int { OK = 0, INVALID = 3, COMPILATION = 6 };

struct Program {
    std::string name, source, log, code;
    std::vector<std::pair<std::string, std::string>> headers;
};

std::string text_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream all;
    all << file.rdbuf();
    return all.str();
}

void write(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
}

// Runs a program, whose output goes to the file `log`. Returns its exit status.
int run(const std::vector<std::string>& arguments, const std::string& log) {
    std::vector<char*> given;
    for (const std::string& each : arguments) {
        given.push_back(const_cast<char*>(each.c_str()));
    }
    given.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    pid_t pid = 0;
    const int failed = posix_spawnp(&pid, given[0], &actions, nullptr, given.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    int status = -1;
    return failed != 0 || waitpid(pid, &status, 0) != pid ? -1 : status;
}

int compile(Program& program, const std::vector<std::string>& options) {
    // Next to the libraries: what a process that was killed has left is removed when they are built again.
    std::string folder = EMULATOR_DRIVER "-XXXXXX";
    if (mkdtemp(folder.data()) == nullptr) {
        program.log = "no folder " + folder;
        return COMPILATION;
    }
    const std::string at = folder + "/";
    for (const auto& [name, text] : program.headers) {
        std::filesystem::create_directories(std::filesystem::path(at + name).parent_path());
        // The emulator has its own instructions of the device.
        const bool is_own = name == "symmpool/impl/ptx.cuh" || name == "symmpool/impl/ptx_tensor.cuh";
        write(at + name, is_own ? text_of(EMULATOR_FOLDER + name.substr(name.rfind('/'))) : text);
    }
    std::string source = "#include \"" EMULATOR_FOLDER "/device.h\"\n#line 1 \"" + program.name + "\"\n";
    source += program.source + "\n";
    const std::regex entry(R"(__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\()");
    const std::string& text = program.source;
    for (std::sregex_iterator found(text.begin(), text.end(), entry), end; found != end; ++found) {
        source += "EMULATED_KERNEL(" + (*found)[1].str() + ")\n";
    }
    write(at + "kernel.cpp", source);
    std::vector<std::string> command = {
        "c++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-fno-exceptions", "-fno-asynchronous-unwind-tables",
        "-ffp-contract=off", "-fno-strict-aliasing", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error",
        // Each access to memory calls a function of `guards.cpp`.
        "-fsanitize=kernel-address", "--param=asan-instrumentation-with-call-threshold=0", "--param=asan-stack=0",
        "--param=asan-globals=0",
        "-D__CUDA_ARCH__=800", "-I", folder};
    for (const std::string& option : options) {
        if (option.rfind("-D", 0) == 0 || option.rfind("--define-macro=", 0) == 0) {
            command.push_back(option[1] == 'D' ? option : "-D" + option.substr(15));
        }
    }
    for (const char* last : {"-o", "kernel.so", "kernel.cpp"}) {
        command.push_back(last[0] == '-' ? last : at + last);
    }
    command.push_back(EMULATOR_DRIVER);
    const int status = run(command, at + "log");
    program.log = text_of(at + "log");
    std::string code = status == 0 ? text_of(at + "kernel.so") : "";
    const unsigned long long bytes = code.size();
    program.code = std::string(reinterpret_cast<const char*>(&bytes), sizeof bytes) + code;
    std::filesystem::remove_all(folder);
    return status == 0 && !code.empty() ? OK : COMPILATION;
}

}  // namespace

extern "C" {

int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, OK; }
const char* nvrtcGetErrorString(int code) { return code == COMPILATION ? "NVRTC_ERROR_COMPILATION" : "an error"; }
int nvrtcGetNumSupportedArchs(int* count) { return *count = 1, OK; }
int nvrtcGetSupportedArchs(int* archs) { return *archs = 90, OK; }

int nvrtcCreateProgram(Program** program, const char* source, const char* name, int count,
                       const char* const* headers, const char* const* names) {
    *program = new Program{name, source, "", "", {}};
    for (int i = 0; i < count; ++i) {
        (*program)->headers.emplace_back(names[i], headers[i]);
    }
    return OK;
}
int nvrtcDestroyProgram(Program** program) { return delete *program, *program = nullptr, OK; }
int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
    return compile(*program, {options, options + count});
}
int nvrtcGetCUBINSize(Program* program, size_t* bytes) { return *bytes = program->code.size(), OK; }
int nvrtcGetCUBIN(Program* program, char* to) {
    return memcpy(to, program->code.data(), program->code.size()), OK;
}
int nvrtcGetPTXSize(Program*, size_t*) { return INVALID; }
int nvrtcGetPTX(Program*, char*) { return INVALID; }
int nvrtcGetProgramLogSize(Program* program, size_t* bytes) { return *bytes = program->log.size() + 1, OK; }
int nvrtcGetProgramLog(Program* program, char* to) {
    return memcpy(to, program->log.c_str(), program->log.size() + 1), OK;
}
}
