"""Knowledge distillation: a student learns from the softened outputs of a frozen teacher."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def mlp(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 5))


class DistillationLoss(nn.Module):
    def __init__(self, temperature, weight):
        super().__init__()
        self.temperature, self.weight = temperature, weight
        self.register_buffer("class_weight", torch.tensor([1.0, 1.0, 2.0, 1.0, 0.5]))

    def forward(self, student_logits, teacher_logits, labels):
        soft_targets = F.softmax(teacher_logits / self.temperature, dim=-1)
        soft_prob = F.log_softmax(student_logits / self.temperature, dim=-1)
        soft = F.kl_div(soft_prob, soft_targets, reduction="batchmean") * self.temperature**2
        hard = F.cross_entropy(student_logits, labels, weight=self.class_weight)
        return self.weight * soft + (1 - self.weight) * hard


def train_knowledge_distillation(teacher, student, criterion, optimizer, loader, device):
    teacher.eval()
    student.train()
    for inputs, labels in loader:
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        with torch.no_grad():
            teacher_logits = teacher(inputs)
        student_logits = student(inputs)
        loss = criterion(student_logits, teacher_logits, labels)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(42)
    device = torch.device(args.device)
    loader = DataLoader(TensorDataset(torch.rand(16, 3, 8, 8), torch.randint(5, (16,))), batch_size=8)
    teacher = mlp(64).to(device)
    student = mlp(8).to(device)
    criterion = DistillationLoss(temperature=2.0, weight=0.25).to(device)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        teacher.load_state_dict(checkpoint["teacher"])
        student.load_state_dict(checkpoint["student"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    train_knowledge_distillation(teacher, student, criterion, optimizer, loader, device)
    if args.save:
        state = {"teacher": teacher.state_dict(), "student": student.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.save)


if __name__ == "__main__":
    main()
